#include "causal_conv1d.h"

#include <cstring>

#include "cpu/launch.h"
#include "gpu/cuda.h"
#include "gpu/metal.h"

namespace dflash {
namespace {

void expect_window(const char* op, const mx::array& window, const mx::array& x) {
  expect_shape(op, "x", x, {-1, -1, -1});
  expect_not_empty(op, "x", x);
  expect_floating(op, "x", x);
  expect_shape(op, "window", window, {x.shape(0), -1, x.shape(2)});
  expect_dtype(op, "window", window, x.dtype());
}

}  // namespace

mx::array causal_conv1d_verify(
    const mx::array& x,
    const mx::array& weight,
    const mx::array& window,
    mx::StreamOrDevice where) {
  const char* op = "causal_conv1d_verify";
  const auto stream = mx::to_stream(where);
  expect_window(op, window, x);
  const int channels = x.shape(2), taps = window.shape(1) + 1;
  if (weight.ndim() == 3) {
    expect_shape(op, "weight", weight, {channels, taps, 1});
  } else {
    expect_shape(op, "weight", weight, {channels, taps});
  }
  expect_dtype(op, "weight", weight, x.dtype());
  std::vector<mx::array> operands;
  for (const auto& each : {x, weight, window}) {
    operands.push_back(row_contiguous(each, stream));
  }
  if (cuda::runs_on(stream)) {
    const cuda::Text text{
        "causal_conv1d",
        {"causal_conv1d.h"},
        {"x", "weight", "window"},
        {"out"},
        {{"T", x.dtype()}, {"C", channels}, {"K", taps}},
        [] {
          return "const int channel = blockIdx.y * blockDim.y + threadIdx.y;\n"
                 "const int t = blockIdx.x % inputs, b = blockIdx.x / inputs;\n"
                 "if (channel < C)"
                 " causal_conv1d<T>(x, weight, window, out, inputs, C, K, channel, t, b);\n";
        }};
    return cuda::launch(
        text,
        operands,
        {{"inputs", x.shape(1)}},
        {x.shape()},
        {x.dtype()},
        {x.shape(0) * x.shape(1), channels, 1},  // y and z end at 65,535
        {1, 128, 1},
        stream)[0];
  }
  return mx::array(
      x.shape(), x.dtype(), std::make_shared<CausalConv1d>(stream), std::move(operands));
}

mx::array conv_window(
    const mx::array& window, const mx::array& x, const mx::array& keep, mx::StreamOrDevice where) {
  const char* op = "conv_window";
  const auto stream = mx::to_stream(where);
  expect_window(op, window, x);
  const auto kept = per_row(op, "keep", keep, x.shape(0), stream);
  if (window.size() == 0) {  // a convolution of one tap has no window
    return window;
  }
  std::vector<mx::array> operands = {
      row_contiguous(window, stream), row_contiguous(x, stream), kept};
  if (cuda::runs_on(stream)) {
    const cuda::Text text{
        "conv_window",
        {"causal_conv1d.h"},
        {"window", "x", "keep"},
        {"out"},
        {{"T", x.dtype()}, {"C", x.shape(2)}, {"K", window.shape(1) + 1}},
        [] {
          return "const int channel = blockIdx.y * blockDim.y + threadIdx.y;\n"
                 "const int row = blockIdx.x % (K - 1), b = blockIdx.x / (K - 1);\n"
                 "if (channel < C)"
                 " conv_window<T>(window, x, keep, out, inputs, C, K, channel, row, b);\n";
        }};
    return cuda::launch(
        text,
        operands,
        {{"inputs", x.shape(1)}},
        {window.shape()},
        {window.dtype()},
        {x.shape(0) * window.shape(1), x.shape(2), 1},
        {1, 128, 1},
        stream)[0];
  }
  return mx::array(
      window.shape(), window.dtype(), std::make_shared<ConvWindow>(stream), std::move(operands));
}

void CausalConv1d::run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  cpu::allocate(outputs);
  const auto& x = inputs[0];
  cpu::CausalConv1d args{
      .x = x.data<void>(),
      .weight = inputs[1].data<void>(),
      .window = inputs[2].data<void>(),
      .out = outputs[0].data<void>(),
      .batch = x.shape(0),
      .inputs = x.shape(1),
      .channels = x.shape(2),
      .taps = inputs[2].shape(1) + 1,
      .type = cpu_type(x.dtype())};
  const size_t work = x.size() * (args.taps + 16);
  cpu::dispatch(stream(), outputs, [args, work, run = cpu::kernels().causal_conv1d] {
    cpu::share(work, [&](int part, int parts) { run(args, part, parts); });
  });
}

void ConvWindow::run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  cpu::allocate(outputs);
  const auto &window = inputs[0], &x = inputs[1];
  const int batch = window.shape(0), rows = window.shape(1), given = x.shape(1);
  const size_t bytes = window.itemsize() * window.shape(2);
  cpu::dispatch(
      stream(),
      outputs,
      [batch,
       rows,
       given,
       bytes,
       from = window.data<char>(),
       inputs = x.data<char>(),
       keep = inputs[2].data<int>(),
       to = outputs[0].data<char>()] {
        cpu::expect_range("conv_window", "keep", keep, batch, given);
        for (int b = 0; b < batch; ++b) {
          for (int row = 0; row < rows; ++row) {
            const int source = row + keep[b];
            const char* at = source < rows ? from + (size_t(b) * rows + source) * bytes
                                           : inputs + (size_t(b) * given + source - rows) * bytes;
            std::memcpy(to + (size_t(b) * rows + row) * bytes, at, bytes);
          }
        }
      });
}

void CausalConv1d::run_metal(
    const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const auto& x = inputs[0];
  const std::string type = shader_type(x.dtype());
  metal::Launch launch(
      stream(), "causal_conv1d", "causal_conv1d_" + type, "causal_conv1d_kernel<" + type + ">", {});
  metal::allocate(outputs);
  for (int i = 0; i < 3; ++i) launch.input(inputs[i], i);
  launch.output(outputs[0], 3);
  launch.scalar(x.shape(1), 4);
  launch.scalar(x.shape(2), 5);
  launch.scalar(inputs[2].shape(1) + 1, 6);
  launch.threads({x.shape(2), x.shape(1), x.shape(0)}, {128, 1, 1});
}

void ConvWindow::run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const auto &window = inputs[0], &x = inputs[1];
  const std::string type = shader_type(x.dtype());
  metal::Launch launch(
      stream(), "causal_conv1d", "conv_window_" + type, "conv_window_kernel<" + type + ">", {});
  metal::allocate(outputs);
  for (int i = 0; i < 3; ++i) launch.input(inputs[i], i);
  launch.output(outputs[0], 3);
  launch.scalar(x.shape(1), 4);
  launch.scalar(x.shape(2), 5);
  launch.scalar(window.shape(1) + 1, 6);
  launch.threads({x.shape(2), window.shape(1), x.shape(0)}, {128, 1, 1});
}

}  // namespace dflash
