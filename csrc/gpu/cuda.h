// The shaders on NVIDIA: the same bodies behind a header, launched by MLX.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/fast.h"

namespace mx = mlx::core;

namespace dflash::cuda {

/// Whether operations on `stream` run on MLX's CUDA backend.
bool runs_on(mx::Stream stream);

/// The lazy outputs of one kernel. `headers` are files of metal/; `body` is the entry's text, in
/// which inputs and outputs are pointers under their names and x_shape is the shape of input x.
/// `grid` counts threads.
std::vector<mx::array> launch(
    const std::string& name,
    const std::vector<std::string>& headers,
    const std::vector<std::string>& inputs,
    const std::vector<std::string>& outputs,
    const std::string& body,
    const std::vector<mx::array>& operands,
    std::vector<mx::Shape> shapes,
    std::vector<mx::Dtype> dtypes,
    std::array<int, 3> grid,
    std::array<int, 3> group,
    const std::vector<std::pair<std::string, mx::fast::TemplateArg>>& constants,
    mx::Stream stream);

}  // namespace dflash::cuda
