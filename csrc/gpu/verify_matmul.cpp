#include "verify_matmul.h"

#include <algorithm>

#include "cuda.h"
#include "metal.h"
#include "tiles.h"

namespace dflash {
namespace {

constexpr int kSlices = 8;  // as in the shader

/// Sizes of one launch. `tiles` of 16 outputs and `column_tiles` of 8 rows are a threadgroup's; the
/// bits do not depend on them.
struct Dims {
  int rows, outputs, depth, experts, repeat, pairs, tiles, column_tiles;
  Dims(
      const MatmulFormat& format,
      const mx::array& x,
      const mx::array& weight,
      size_t results,
      mx::Stream stream)
      : rows(int(x.size() / format.inputs)),
        outputs(format.outputs),
        depth(format.inputs),
        experts(format.gathers ? weight.shape(0) : 1),
        repeat(format.gathers ? int(results / format.outputs) / rows : 1),
        pairs(format.gathers ? int(results / format.outputs) : 1),
        tiles(outputs >= 65536 && !format.group_size ? tiles_of(stream).matmul : 1),
        column_tiles(
            format.gathers || rows <= 8 ? 1
            : rows <= 16                ? 2
                                        : 4) {
  }
  int blocks() const {
    return (outputs + 16 * tiles - 1) / (16 * tiles) * pairs;
  }
  int row_blocks() const {
    return pairs > 1 ? 1 : (rows + 8 * column_tiles - 1) / (8 * column_tiles);
  }
};

}  // namespace

std::vector<mx::array> cuda::verify_matmuls(
    const MatmulFormat& format,
    const mx::array& x,
    const std::vector<std::vector<mx::array>>& weights,
    const std::optional<mx::array>& indices,
    const std::vector<mx::Shape>& shapes,
    mx::Stream stream) {
  const int count = int(weights.size());
  size_t results = 1;
  for (int n : shapes[0]) results *= n;
  auto largest = format;
  for (const auto& shape : shapes) largest.outputs = std::max(largest.outputs, shape.back());
  const Dims d(largest, x, weights[0][0], results, stream);
  int blocks = 0;
  std::vector<std::string> inputs = {"x"}, outputs;
  std::vector<mx::array> operands = {x};
  std::vector<std::pair<std::string, int>> sizes = {
      {"rows", d.rows}, {"depth", d.depth}, {"experts", d.experts}};
  for (int i = 0; i < count; ++i) {
    const auto number = std::to_string(i);
    inputs.push_back("weight" + number);
    if (format.group_size) {
      inputs.push_back("scales" + number);
      inputs.push_back("offsets" + number);
    }
    if (format.biased) inputs.push_back("bias" + number);
    operands.insert(operands.end(), weights[i].begin(), weights[i].end());
    outputs.push_back("out" + number);
    sizes.emplace_back("outputs" + number, shapes[i].back());
    blocks += (shapes[i].back() + 16 * d.tiles - 1) / (16 * d.tiles) * d.pairs;
  }
  if (format.gathers) {
    inputs.push_back("indices");
    operands.push_back(*indices);
  }
  const auto dtype = x.dtype();
  const auto values = weights[0][format.group_size ? 1 : 0].dtype();
  const Text text{
      "verify_matmul",
      {"matrix_on_cuda.h", "verify_matmul.h"},
      inputs,
      outputs,
      {{"T", dtype},
       {"S", values},
       {"bits", format.bits},
       {"group", format.group_size},
       {"tiles", d.tiles},
       {"columns", d.column_tiles},
       {"repeat", d.repeat},
       {"gathers", format.gathers},
       {"has_bias", format.biased}},
      [&] {
        const std::string none = "nullptr", first_bias = format.biased ? "bias0" : none;
        std::string body =
            "__shared__ float shared[DFLASH_SLICES * 16 * tiles * 8 * columns];"
            "int block = blockIdx.x, outputs = outputs0;"
            "const T* bias = " +
            first_bias + "; T* out = out0; auto weight = weight0;";
        if (format.group_size) body += "auto scales = scales0; auto offsets = offsets0;";
        for (int i = 1; i < count; ++i) {  // the later weights' blocks follow
          const auto number = std::to_string(i);
          const auto blocks_before = "const int blocks" + number + " = (outputs" +
                                     std::to_string(i - 1) + " + 16 * tiles - 1) / (16 * tiles);";
          body += blocks_before + "if (block >= blocks" + number + ") { block -= blocks" + number +
                  "; outputs = outputs" + number + "; weight = weight" + number + "; out = out" +
                  number + ";";
          if (format.group_size) {
            body += "scales = scales" + number + "; offsets = offsets" + number + ";";
          }
          if (format.biased) body += "bias = bias" + number + ";";
        }
        body += std::string(count - 1, '}');
        const std::string call =
            format.group_size
                ? "verify_matmul_affine<T, S, bits, group, tiles, columns, decltype(whole)::value>("
                  "x, weight, scales, offsets, "
                : "verify_matmul_dense<T, S, tiles, columns, decltype(whole)::value>(x, weight, ";
        return body + "const MatmulPlace at = matmul_place(" + (indices ? "indices" : none) +
               ", gathers, experts, rows, outputs, depth, 8 * columns, 16 * tiles, block,"
               " int(blockIdx.y), int(threadIdx.y), int(threadIdx.x));"
               "auto multiply = [&](auto whole) { " +
               call +
               "bias, out, has_bias, repeat, at, shared); };"
               "const auto addresses ="
               " reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(weight);"
               "if (addresses % 16 == 0 && depth % 32 == 0) multiply(Constant<true>());"
               " else multiply(Constant<false>());";
      }};
  return launch(
      text,
      operands,
      sizes,
      shapes,
      std::vector<mx::Dtype>(count, dtype),
      {32 * blocks, kSlices * d.row_blocks(), 1},
      {32, kSlices, 1},
      stream);
}

void VerifyMatmul::run_metal(
    const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const auto &x = inputs[0], &weight = inputs[1];
  const Dims d(format_, x, weight, outputs[0].size(), stream());
  const std::string type = shader_type(outputs[0].dtype());
  const auto& values = format_.group_size ? inputs[2] : weight;
  const std::string sizes[] = {
      std::to_string(format_.bits),
      std::to_string(format_.group_size),
      std::to_string(d.tiles),
      std::to_string(d.column_tiles)};
  std::string name = format_.group_size ? "affine" : "dense", instance;
  const std::string kernel = "verify_matmul_" + name;
  name = kernel + "_" + type + "_" + shader_type(values.dtype());
  instance = kernel + "_kernel<" + type + ", " + shader_type(values.dtype());
  for (int i = format_.group_size ? 0 : 2; i < 4; ++i) {
    name += "_" + sizes[i];
    instance += ", " + sizes[i];
  }
  metal::Launch launch(
      stream(), "verify_matmul", name, instance + ">", {format_.biased, format_.gathers});
  metal::allocate(outputs);
  const int after = format_.group_size ? 4 : 2;
  launch.input(x, 0);
  launch.input(weight, 1);
  launch.input(format_.biased ? inputs[after] : x, 2);
  launch.input(format_.gathers ? inputs.back() : x, 3);
  launch.output(outputs[0], 4);
  int index = 5;
  for (int size : {d.rows, d.outputs, d.depth, d.experts, d.repeat}) {
    launch.scalar(size, index++);
  }
  if (format_.group_size) {
    launch.input(inputs[2], 10);
    launch.input(inputs[3], 11);
  }
  launch.threadgroups({d.blocks(), d.row_blocks(), 1}, {32, kSlices, 1});
}

}  // namespace dflash
