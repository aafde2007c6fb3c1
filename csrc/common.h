// What the operations share: messages, casts, and the primitive that runs a kernel on any backend.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

#include "cpu/kernels.h"

namespace dflash {

namespace mx = mlx::core;

/// std::invalid_argument: "[op] <parts of the message>."
template <typename... Parts>
[[noreturn]] void refuse(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << "[" << op << "] ";
  (message << ... << parts);
  message << ".";
  throw std::invalid_argument(message.str());
}

/// Refuses `x` unless it has the given shape; -1 stands for any size.
void expect_shape(const char* op, const char* name, const mx::array& x, const mx::Shape& shape);

/// Refuses `x` unless its dtype is fp32, fp16 or bf16.
void expect_floating(const char* op, const char* name, const mx::array& x);

/// Refuses `x` unless it has the given dtype.
void expect_dtype(const char* op, const char* name, const mx::array& x, mx::Dtype dtype);

/// `x` as int32; refuses types that are not integers. What 32 bits do not hold stays out of range.
mx::array as_int32(const char* op, const char* name, const mx::array& x, mx::Stream stream);

/// `x` as int32 [B] (`keep`, `lengths`); refuses other shapes and types that are not integers.
mx::array per_row(
    const char* op, const char* name, const mx::array& x, int batch, mx::Stream stream);

/// `x`, made row contiguous where it is not known to be. (A copy node is not free even where it
/// copies nothing, and it would keep a cache from being donated.)
mx::array row_contiguous(const mx::array& x, mx::Stream stream);

/// Refuses an empty dimension.
void expect_not_empty(const char* op, const char* name, const mx::array& x);

cpu::Type cpu_type(mx::Dtype dtype);

/// "float", "half" or "bfloat": the shaders' names of the activations' dtypes.
const char* shader_type(mx::Dtype dtype);

/// A primitive with a native CPU kernel and a Metal kernel. (On CUDA an operation builds an MLX
/// kernel instead, see gpu/cuda.h.)
class KernelPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) final;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) final;

 protected:
  virtual void run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) = 0;
  virtual void run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) = 0;
};

}  // namespace dflash
