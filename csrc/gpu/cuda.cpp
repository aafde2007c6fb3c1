#include "cuda.h"

#include "mlx/backend/cuda/cuda.h"

#include "sources.h"

namespace dflash::cuda {
namespace {

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const auto& part : parts) {
    text += part + ",";
  }
  return text;
}

/// One maker a kernel text, built on first use: on a machine without CUDA making one throws.
mx::fast::CustomKernelFunction& kernel(
    const std::string& name,
    const std::vector<std::string>& headers,
    const std::vector<std::string>& inputs,
    const std::vector<std::string>& outputs,
    const std::string& body) {
  static thread_local std::unordered_map<std::string, mx::fast::CustomKernelFunction> made;
  const std::string key = name + "(" + join(inputs) + ")(" + join(outputs) + ")" + body;
  auto found = made.find(key);
  if (found == made.end()) {
    std::string header = embedded_source("metal_on_cuda.h");
    for (const auto& file : headers) {
      header += embedded_source(file);
    }
    found = made.emplace(
                    key,
                    mx::fast::cuda_kernel(
                        "dflash_" + name + "_" + embedded_hash(), inputs, outputs, body, header))
                .first;
  }
  return found->second;
}

}  // namespace

bool runs_on(mx::Stream stream) {
  return stream.device == mx::Device::gpu && mx::cu::is_available();
}

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
    mx::Stream stream) {
  for (int i = 0; i < 3; ++i) {  // whole blocks: the body checks
    grid[i] = (grid[i] + group[i] - 1) / group[i] * group[i];
  }
  return kernel(name, headers, inputs, outputs, body)(
      operands,
      shapes,
      dtypes,
      {grid[0], grid[1], grid[2]},
      {group[0], group[1], group[2]},
      constants,
      std::nullopt,
      false,
      stream);
}

}  // namespace dflash::cuda
