#include "gated_delta_gates.h"

#include "cpu/launch.h"
#include "gpu/cuda.h"
#include "gpu/metal.h"

namespace dflash {

std::pair<mx::array, mx::array> gated_delta_gates(
    const mx::array& a,
    const mx::array& b,
    const mx::array& A_log,
    const mx::array& dt_bias,
    mx::StreamOrDevice where) {
  const char* op = "gated_delta_gates";
  const auto stream = mx::to_stream(where);
  expect_shape(op, "a", a, {-1, -1, -1});
  expect_shape(op, "b", b, a.shape());
  expect_not_empty(op, "a", a);
  expect_floating(op, "a", a);
  expect_dtype(op, "b", b, a.dtype());
  const int heads = a.shape(2);
  for (auto [name, x] : {std::pair{"A_log", A_log}, std::pair{"dt_bias", dt_bias}}) {
    expect_shape(op, name, x, {heads});
    expect_floating(op, name, x);
  }
  std::vector<mx::array> operands;
  for (const auto& x : {a, b}) {
    operands.push_back(row_contiguous(x, stream));
  }
  auto wide = [&](const mx::array& x) {
    return row_contiguous(mx::astype(x, mx::float32, stream), stream);
  };
  operands.push_back(wide(A_log));
  operands.push_back(cuda::runs_on(stream) ? dt_bias : wide(dt_bias));  // a launch less
  std::vector<mx::Shape> shapes = {a.shape(), a.shape()};
  std::vector<mx::Dtype> dtypes = {mx::float32, mx::float32};
  if (cuda::runs_on(stream)) {
    const cuda::Text text{
        "gated_delta_gates",
        {"gated_delta_gates.h"},
        {"a", "b", "A_log", "dt_bias"},
        {"g", "beta"},
        {{"T", a.dtype()}},
        [] {
          return "const int at = blockIdx.x * blockDim.x + threadIdx.x;\n"
                 "if (at < size) gated_delta_gates<T>(a, b, A_log, dt_bias, g, beta, heads, at);\n";
        }};
    auto out = cuda::launch(
        text,
        operands,
        {{"size", int(a.size())}, {"heads", heads}},
        shapes,
        dtypes,
        {int(a.size()), 1, 1},
        {128, 1, 1},
        stream);
    return {out[0], out[1]};
  }
  auto out = mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<GatedDeltaGates>(stream), std::move(operands));
  return {out[0], out[1]};
}

void GatedDeltaGates::run_cpu(
    const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  cpu::allocate(outputs);
  cpu::Gates args{
      .a = inputs[0].data<void>(),
      .b = inputs[1].data<void>(),
      .A_log = inputs[2].data<float>(),
      .dt_bias = inputs[3].data<float>(),
      .g = outputs[0].data<float>(),
      .beta = outputs[1].data<float>(),
      .rows = size_t(inputs[0].shape(0)) * inputs[0].shape(1),
      .heads = inputs[0].shape(2),
      .type = cpu_type(inputs[0].dtype())};
  cpu::dispatch(stream(), outputs, [args, run = cpu::kernels().gates] {
    constexpr size_t kCostOfAnElement = 64;
    cpu::share(args.rows * args.heads * kCostOfAnElement, [&](int part, int parts) {
      run(args, part, parts);
    });
  });
}

void GatedDeltaGates::run_metal(
    const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const std::string type = shader_type(inputs[0].dtype());
  metal::Launch launch(
      stream(),
      "gated_delta_gates",
      "gated_delta_gates_" + type,
      "gated_delta_gates_kernel<" + type + ">",
      {});
  metal::allocate(outputs);
  for (int i = 0; i < 4; ++i) launch.input(inputs[i], i);
  for (int i = 0; i < 2; ++i) launch.output(outputs[i], 4 + i);
  launch.scalar(inputs[0].shape(2), 6);
  launch.threads({int(inputs[0].size()), 1, 1}, {128, 1, 1});
}

}  // namespace dflash
