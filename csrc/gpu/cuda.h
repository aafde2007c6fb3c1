// The shaders on NVIDIA: the same bodies behind a header, launched by MLX.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/fast.h"

namespace mx = mlx::core;

namespace dflash::cuda {

/// Whether operations on `stream` run on MLX's CUDA backend.
bool runs_on(mx::Stream stream);

/// The text of a kernel, whose `constants` are known when it is compiled.
struct Text {
  std::string name;
  std::vector<std::string> headers;  ///< files of metal/
  std::vector<std::string> inputs, outputs;
  std::vector<std::pair<std::string, mx::fast::TemplateArg>> constants;
  /// The entry's statements: inputs and outputs are pointers under their names, constants and sizes
  /// have theirs. Called once for all texts with the same names, constants and dtypes.
  std::function<std::string()> body;
};

/// The lazy outputs of one launch. `sizes` are passed to it; `grid` counts threads.
std::vector<mx::array> launch(
    const Text& text,
    const std::vector<mx::array>& operands,
    const std::vector<std::pair<std::string, int>>& sizes,
    const std::vector<mx::Shape>& shapes,
    const std::vector<mx::Dtype>& dtypes,
    std::array<int, 3> grid,
    std::array<int, 3> group,
    mx::Stream stream);

}  // namespace dflash::cuda
