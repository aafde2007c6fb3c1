#include "common.h"

#include <limits>

#include "mlx/transforms.h"

#include "gpu/cuda.h"

namespace dflash {

namespace {

std::string describe(const mx::Shape& shape) {
  std::ostringstream out;
  out << "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    out << (i ? ", " : "");
    if (shape[i] < 0) {
      out << "any";
    } else {
      out << shape[i];
    }
  }
  out << (shape.size() == 1 ? ",)" : ")");
  return out.str();
}

}  // namespace

void expect_shape(const char* op, const char* name, const mx::array& x, const mx::Shape& shape) {
  bool same = x.ndim() == shape.size();
  for (size_t i = 0; same && i < shape.size(); ++i) {
    same = shape[i] < 0 || x.shape(i) == shape[i];
  }
  if (!same) {
    refuse(op, "expected ", name, " of shape ", describe(shape), " but got ", describe(x.shape()));
  }
}

void expect_floating(const char* op, const char* name, const mx::array& x) {
  if (x.dtype() != mx::float32 && x.dtype() != mx::float16 && x.dtype() != mx::bfloat16) {
    refuse(op, "expected ", name, " in float32, float16 or bfloat16 but got ", x.dtype());
  }
}

void expect_dtype(const char* op, const char* name, const mx::array& x, mx::Dtype dtype) {
  if (x.dtype() != dtype) {
    refuse(op, "expected ", name, " in ", dtype, " but got ", x.dtype());
  }
}

mx::array as_int32(const char* op, const char* name, const mx::array& x, mx::Stream stream) {
  if (!mx::issubdtype(x.dtype(), mx::integer)) {
    refuse(op, "expected ", name, " as integers but got ", x.dtype());
  }
  auto narrow = x;
  if (x.dtype() == mx::int64) {
    narrow = mx::maximum(x, mx::array(int64_t(-1)), stream);
  }
  if (mx::size_of(x.dtype()) == 8 || x.dtype() == mx::uint32) {
    const auto limit = mx::astype(mx::array(std::numeric_limits<int>::max()), x.dtype(), stream);
    narrow = mx::minimum(narrow, limit, stream);
  }
  return row_contiguous(mx::astype(narrow, mx::int32, stream), stream);
}

mx::array per_row(
    const char* op, const char* name, const mx::array& x, int batch, mx::Stream stream) {
  const auto rows = as_int32(op, name, x, stream);
  expect_shape(op, name, x, {batch});
  return rows;
}

mx::array row_contiguous(const mx::array& x, mx::Stream stream) {
  if (cuda::runs_on(stream)) {
    return x;  // MLX's kernel launch sees to it
  }
  const bool ours = x.has_primitive() && dynamic_cast<const KernelPrimitive*>(&x.primitive());
  // The flags of an array without memory, a placeholder of mx.compile say, mean nothing.
  const bool known = x.data_shared_ptr() ? x.flags().row_contiguous : ours;
  return known ? x : mx::contiguous(x, false, stream);
}

void expect_not_empty(const char* op, const char* name, const mx::array& x) {
  if (x.size() == 0) {
    refuse(op, "expected ", name, " with no empty dimension but got shape ", describe(x.shape()));
  }
}

cpu::Type cpu_type(mx::Dtype dtype) {
  return dtype == mx::float32   ? cpu::Type::f32
         : dtype == mx::float16 ? cpu::Type::f16
                                : cpu::Type::bf16;
}

const char* shader_type(mx::Dtype dtype) {
  return dtype == mx::float32 ? "float" : dtype == mx::float16 ? "half" : "bfloat";
}

void KernelPrimitive::eval_cpu(
    const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
#ifdef DFLASH_METAL_MOCK  // tests run the Metal host code on Linux, on a mock device
  mx::synchronize(stream());
  run_metal(inputs, outputs);
#else
  run_cpu(inputs, outputs);
#endif
}

void KernelPrimitive::eval_gpu(
    const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  run_metal(inputs, outputs);
}

}  // namespace dflash
