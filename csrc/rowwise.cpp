#include "rowwise.h"

#include <cmath>

#include "mlx/backend/cpu/simd/simd.h"
#include "mlx/compile.h"
#include "mlx/fast.h"
#include "mlx/utils.h"

#include "cpu/launch.h"

namespace dflash {
namespace {

void expect_rows(const char* op, const char* name, const mx::array& x) {
  expect_not_empty(op, name, x);
  expect_floating(op, name, x);
  if (x.ndim() == 0 || x.ndim() > cpu::Rows::kLeading + 1) {
    refuse(
        op,
        "expected ",
        name,
        " with 1 .. ",
        cpu::Rows::kLeading + 1,
        " dimensions but got ",
        x.ndim());
  }
}

mx::array as_float(const mx::array& x) {
  return mx::astype(x, mx::float32);
}

/// [gate, up] to silu(gate) up, and [x, gate] to x sigmoid(gate): fp32 inside, rounded once.
std::vector<mx::array> swiglu_of(const std::vector<mx::array>& inputs) {
  const auto gate = as_float(inputs[0]);
  return {mx::astype(gate * mx::sigmoid(gate) * as_float(inputs[1]), inputs[1].dtype())};
}

std::vector<mx::array> sigmoid_gate_of(const std::vector<mx::array>& inputs) {
  return {mx::astype(as_float(inputs[0]) * mx::sigmoid(as_float(inputs[1])), inputs[0].dtype())};
}

/// MLX's own kernels, whose rows are independent on a GPU. The operands have one dtype.
std::vector<mx::array> run_mlx(
    cpu::RowwiseKind kind,
    std::vector<mx::array> operands,
    bool has_weight,
    float eps,
    mx::Stream stream) {
  using Fused = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;
  // Not destroyed: MLX may be gone by then.
  static const auto& swiglu = *new Fused(mx::compile(swiglu_of, true));
  static const auto& sigmoid_gate = *new Fused(mx::compile(sigmoid_gate_of, true));
  auto fused = [&](const Fused& function, const std::vector<mx::array>& arguments) {
    const mx::StreamContext context(stream);
    return function(arguments);
  };
  std::optional<mx::array> weight;
  if (has_weight) weight = operands.back();
  switch (kind) {
    case cpu::RowwiseKind::rms_norm:
      return {mx::fast::rms_norm(operands[0], weight, eps, stream)};
    case cpu::RowwiseKind::rms_norm_gated:
      return fused(swiglu, {operands[1], mx::fast::rms_norm(operands[0], weight, eps, stream)});
    case cpu::RowwiseKind::add_rms_norm: {
      const auto total = mx::add(operands[0], operands[1], stream);
      return {total, mx::fast::rms_norm(total, weight, eps, stream)};
    }
    case cpu::RowwiseKind::swiglu:
      return fused(swiglu, {operands[1], operands[0]});
    case cpu::RowwiseKind::sigmoid_gate:
      return fused(sigmoid_gate, operands);
  }
  throw std::logic_error("no such operation");
}

/// One operation on x, a second operand of its shape and a weight, all in their promoted dtype.
std::vector<mx::array> run(
    const char* op,
    cpu::RowwiseKind kind,
    const mx::array& x,
    const char* x_name,
    const std::optional<mx::array>& other,
    const char* other_name,
    const std::optional<mx::array>& weight,
    float eps,
    mx::StreamOrDevice where) {
  const auto stream = mx::to_stream(where);
  expect_rows(op, x_name, x);
  auto dtype = x.dtype();
  if (other) {
    expect_shape(op, other_name, *other, x.shape());
    expect_floating(op, other_name, *other);
    dtype = mx::promote_types(dtype, other->dtype());
  }
  if (weight) {
    expect_shape(op, "weight", *weight, {x.shape(-1)});
    expect_floating(op, "weight", *weight);
    dtype = mx::promote_types(dtype, weight->dtype());
  }
  std::vector<mx::array> operands = {mx::astype(x, dtype, stream)};
  if (other) {
    operands.push_back(mx::astype(*other, dtype, stream));
  }
  if (weight) {
    operands.push_back(row_contiguous(mx::astype(*weight, dtype, stream), stream));
  }
  if (stream.device == mx::Device::gpu) {
    return run_mlx(kind, std::move(operands), weight.has_value(), eps, stream);
  }
  const size_t outputs = kind == cpu::RowwiseKind::add_rms_norm ? 2 : 1;
  return mx::array::make_arrays(
      std::vector<mx::Shape>(outputs, x.shape()),
      std::vector<mx::Dtype>(outputs, dtype),
      std::make_shared<Rowwise>(stream, kind, eps, weight.has_value()),
      std::move(operands));
}

/// The rows of an evaluated array, however it lies in memory.
cpu::Rows rows_of(const mx::array& x) {
  cpu::Rows rows{
      .data = x.data<void>(), .step = long(x.strides().back()), .leading = int(x.ndim()) - 1};
  for (int d = 0; d < rows.leading; ++d) {
    rows.shape[d] = x.shape(d);
    rows.strides[d] = long(x.strides()[d]);
  }
  return rows;
}

}  // namespace

mx::array rms_norm(
    const mx::array& x,
    const std::optional<mx::array>& weight,
    float eps,
    mx::StreamOrDevice stream) {
  const auto kind = cpu::RowwiseKind::rms_norm;
  return run("rms_norm", kind, x, "x", {}, "", weight, eps, stream)[0];
}

mx::array rms_norm_gated(
    const mx::array& x,
    const mx::array& gate,
    const std::optional<mx::array>& weight,
    float eps,
    mx::StreamOrDevice where) {
  const auto stream = mx::to_stream(where);
  const auto kind = cpu::RowwiseKind::rms_norm_gated;
  const auto out = run("rms_norm_gated", kind, x, "x", gate, "gate", weight, eps, stream);
  return mx::astype(out[0], x.dtype(), stream);
}

std::pair<mx::array, mx::array> add_rms_norm(
    const mx::array& x,
    const mx::array& residual,
    const std::optional<mx::array>& weight,
    float eps,
    mx::StreamOrDevice stream) {
  const auto kind = cpu::RowwiseKind::add_rms_norm;
  const auto out = run("add_rms_norm", kind, x, "x", residual, "residual", weight, eps, stream);
  return {out[0], out[1]};
}

mx::array swiglu(const mx::array& gate, const mx::array& up, mx::StreamOrDevice stream) {
  return run("swiglu", cpu::RowwiseKind::swiglu, up, "up", gate, "gate", {}, 0, stream)[0];
}

mx::array sigmoid_gate(const mx::array& x, const mx::array& gate, mx::StreamOrDevice stream) {
  const auto kind = cpu::RowwiseKind::sigmoid_gate;
  return run("sigmoid_gate", kind, x, "x", gate, "gate", {}, 0, stream)[0];
}

mx::array rope(
    const mx::array& x,
    const mx::array& lengths,
    int dims,
    std::optional<float> base,
    const std::optional<mx::array>& freqs,
    float scale,
    bool traditional,
    mx::StreamOrDevice where) {
  const char* op = "rope";
  const auto stream = mx::to_stream(where);
  expect_shape(op, "x", x, {-1, -1, -1, -1});
  expect_rows(op, "x", x);
  if (x.shape(3) > cpu::kMaxRopeDim) {
    refuse(op, "expected D of at most ", cpu::kMaxRopeDim, " but got ", x.shape(3));
  }
  if (dims < 2 || dims % 2 != 0 || dims > x.shape(3)) {
    refuse(op, "expected dims to be even, 2 .. ", x.shape(3), ", but got ", dims);
  }
  if (base.has_value() == freqs.has_value()) {
    refuse(op, "expected one of base and freqs but got ", base ? "both" : "neither");
  }
  std::vector<mx::array> operands = {x, per_row(op, "lengths", lengths, x.shape(0), stream)};
  if (freqs) {
    expect_shape(op, "freqs", *freqs, {dims / 2});
    expect_floating(op, "freqs", *freqs);
    operands.push_back(row_contiguous(mx::astype(*freqs, mx::float32, stream), stream));
  }
  if (stream.device == mx::Device::gpu) {
    return mx::fast::rope(x, dims, traditional, base, scale, operands[1], freqs, stream);
  }
  return mx::array(
      x.shape(),
      x.dtype(),
      std::make_shared<Rope>(stream, dims, base, scale, traditional),
      std::move(operands));
}

void Rowwise::run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  cpu::allocate(outputs);
  const auto& x = inputs[0];
  const bool has_other = inputs.size() > 1 + size_t(has_weight_);
  cpu::Rowwise args{
      .kind = kind_,
      .x = rows_of(x),
      .y = has_other ? rows_of(inputs[1]) : cpu::Rows{},
      .weight = has_weight_ ? inputs.back().data<void>() : nullptr,
      .out = outputs.back().data<void>(),
      .sum = outputs[0].data<void>(),
      .rows = long(x.size() / x.shape(-1)),
      .size = x.shape(-1),
      .eps = eps_,
      .type = cpu_type(x.dtype())};
  const bool exponential =
      kind_ != cpu::RowwiseKind::rms_norm && kind_ != cpu::RowwiseKind::add_rms_norm;
  const size_t work = x.size() * (exponential ? 16 : 4);
  cpu::dispatch(stream(), outputs, [args, work, run = cpu::kernels().rowwise] {
    cpu::share(work, [&](int part, int parts) { run(args, part, parts); });
  });
}

void Rope::run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  cpu::allocate(outputs);
  const auto& x = inputs[0];
  cpu::Rope args{
      .x = rows_of(x),
      .lengths = inputs[1].data<int>(),
      .out = outputs[0].data<void>(),
      .batch = x.shape(0),
      .heads = x.shape(1),
      .inputs = x.shape(2),
      .size = x.shape(3),
      .dims = dims_,
      .traditional = traditional_,
      .scale = scale_,
      .type = cpu_type(x.dtype())};
  const float* freqs = base_ ? nullptr : inputs[2].data<float>();
  const float step = base_ ? std::log(*base_) / float(dims_ / 2) : 0.0f;
  const size_t work = x.size() * 4;
  cpu::dispatch(stream(), outputs, [args, freqs, step, work, run = cpu::kernels().rope] {
    std::vector<float> frequencies(args.dims / 2);
    for (int i = 0; i < args.dims / 2; ++i) {
      // MLX's exp, whose last bits count at a far position: a prompt may have had MLX's angles.
      const mx::simd::Simd<float, 1> exponent(float(-i) * step);
      frequencies[i] = freqs ? 1.0f / freqs[i] : mx::simd::exp(exponent).value;
    }
    auto turns = args;
    turns.frequencies = frequencies.data();
    cpu::share(work, [&](int part, int parts) { run(turns, part, parts); });
  });
}

// Only on the mock device of the tests, whose streams are the CPU's.
void Rowwise::run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  run_cpu(inputs, outputs);
}

void Rope::run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  run_cpu(inputs, outputs);
}

}  // namespace dflash
