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

mx::array cuda::verify_matmul(
    const MatmulFormat& format,
    const std::vector<mx::array>& operands,
    const mx::Shape& shape,
    mx::Stream stream) {
  const auto& weight = operands[1];
  const auto dtype = operands[0].dtype();
  size_t results = 1;
  for (int n : shape) results *= n;
  const Dims d(format, operands[0], weight, results, stream);
  std::vector<std::string> names = {"x", "weight"};
  std::vector<mx::array> given = {mx::reshape(operands[0], {d.rows, d.depth}, stream), weight};
  size_t next = 2;
  auto take = [&](bool present, const char* name) {
    if (present) {
      names.push_back(name);
      given.push_back(operands[next++]);
    }
  };
  take(format.group_size, "scales");
  take(format.group_size, "offsets");
  take(format.biased, "bias");
  take(format.gathers, "indices");
  auto pointer = [](bool present, const char* type, const char* name) {
    return present ? std::string(name) : std::string("static_cast<const ") + type + "*>(nullptr)";
  };
  const std::string bias = pointer(format.biased, "T", "bias");
  const std::string call =
      format.group_size
          ? "verify_matmul_affine<T, S, bits, group, tiles, columns, decltype(whole)::value>(x, "
            "weight,"
            " scales, offsets, "
          : "verify_matmul_dense<T, S, tiles, columns, decltype(whole)::value>(x, weight, ";
  const auto source =
      "__shared__ float shared[DFLASH_SLICES * 16 * tiles * 8 * columns];"
      "const int depth = x_shape[1];"
      "const MatmulPlace at = matmul_place(" +
      pointer(format.gathers, "int", "indices") +
      ", gathers, weight_shape[0], x_shape[0], weight_shape[gathers ? 1 : 0], depth, 8 * columns,"
      " 16 * tiles, int(blockIdx.x), int(blockIdx.y), int(threadIdx.y), int(threadIdx.x));"
      "auto multiply = [&](auto whole) { " +
      call + bias +
      ", out, has_bias, repeat, at, shared); };"
      "const auto addresses = reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(weight);"
      "if (addresses % 16 == 0 && depth % 32 == 0) multiply(Constant<true>());"
      " else multiply(Constant<false>());";
  return cuda::launch(
      "verify_matmul",
      {"matrix_on_cuda.h", "verify_matmul.h"},
      names,
      {"out"},
      source,
      given,
      {shape},
      {dtype},
      {32 * d.blocks(), kSlices * d.row_blocks(), 1},
      {32, kSlices, 1},
      {{"T", dtype},
       {"S", format.group_size ? operands[2].dtype() : weight.dtype()},
       {"bits", format.bits},
       {"group", format.group_size},
       {"tiles", d.tiles},
       {"columns", d.column_tiles},
       {"repeat", d.repeat},
       {"gathers", format.gathers},
       {"has_bias", format.biased}},
      stream)[0];
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
