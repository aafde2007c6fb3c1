// Preloaded, makes MLX's CPU build say that it has an H100: kernels are compiled for it as for a
// real one, and what would be launched is printed instead.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "mlx/backend/gpu/device_info.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/utils.h"

namespace mlx::core {

Stream to_stream(StreamOrDevice where) {
  if (auto type = std::get_if<Device::DeviceType>(&where); type && *type == Device::gpu) {
    return Stream(7, Device::gpu);
  }
  auto stream = std::get_if<Stream>(&where);
  return stream ? *stream : default_stream(Device::cpu);
}

namespace cu {

bool is_available() {
  return true;
}

}  // namespace cu

namespace gpu {

const std::unordered_map<std::string, std::variant<std::string, size_t>>& device_info(int) {
  const size_t capability = std::atoi(std::getenv("PRETENDED_CAPABILITY"));
  static const std::unordered_map<std::string, std::variant<std::string, size_t>> info = {
      {"compute_capability_major", capability / 10}, {"compute_capability_minor", capability % 10}};
  return info;
}

}  // namespace gpu

namespace fast {

std::vector<array> precompiled_cuda_kernel(
    const std::string& name,
    const std::string& code,
    const std::vector<array>& inputs,
    const std::vector<Shape>& shapes,
    const std::vector<Dtype>& dtypes,
    const std::vector<ScalarArg>& scalars,
    std::tuple<int, int, int> grid,
    std::tuple<int, int, int> group,
    int,
    std::optional<float>,
    bool contiguous,
    StreamOrDevice) {
  if (!contiguous) throw std::logic_error("strided inputs would be read as if they were not");
  std::printf(
      "%s %s %zu %zu", name.c_str(), code.substr(1, 3).c_str(), inputs.size(), shapes.size());
  for (const auto& scalar : scalars) std::printf(" %d", std::get<int>(scalar));
  auto [x, y, z] = grid;
  auto [tx, ty, tz] = group;
  std::printf(" grid %d %d %d group %d %d %d\n", x, y, z, tx, ty, tz);
  std::fflush(stdout);
  std::vector<array> outputs;
  for (size_t i = 0; i < shapes.size(); ++i) {
    outputs.push_back(zeros(shapes[i], dtypes[i], Device::cpu));
  }
  return outputs;
}

}  // namespace fast
}  // namespace mlx::core
