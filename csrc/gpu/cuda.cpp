#include "cuda.h"

#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "mlx/backend/cuda/cuda.h"
#include "mlx/backend/gpu/device_info.h"

#include "nvrtc.h"
#include "sources.h"

namespace dflash::cuda {
namespace {

/// What metal_on_cuda.h calls a dtype.
std::string type_name(mx::Dtype dtype) {
  switch (dtype) {
    case mx::bool_:
      return "bool";
    case mx::int32:
      return "int";
    case mx::uint32:
      return "uint";
    case mx::float32:
      return "float";
    case mx::float16:
      return "half";
    case mx::bfloat16:
      return "bfloat";
    default:
      throw std::logic_error("a dtype that no CUDA kernel takes");
  }
}

std::string definition(const std::string& name, const mx::fast::TemplateArg& value) {
  if (auto dtype = std::get_if<mx::Dtype>(&value)) {
    return "using " + name + " = " + type_name(*dtype) + ";\n";
  }
  if (auto flag = std::get_if<bool>(&value)) {
    return "constexpr bool " + name + (*flag ? " = true;\n" : " = false;\n");
  }
  return "constexpr int " + name + " = " + std::to_string(std::get<int>(value)) + ";\n";
}

int capability() {
  static const int found = [] {
    const auto& info = mx::gpu::device_info(0);
    auto number = [&](const char* key) { return int(std::get<size_t>(info.at(key))); };
    return 10 * number("compute_capability_major") + number("compute_capability_minor");
  }();
  return found;
}

using Sizes = std::vector<std::pair<std::string, int>>;

/// The whole program: parameters are the inputs, the outputs, and then the sizes.
std::string program(
    const Text& text,
    const std::vector<mx::array>& operands,
    const Sizes& sizes,
    const std::vector<mx::Dtype>& dtypes) {
  std::string whole = embedded_source("metal_on_cuda.h");
  for (const auto& file : text.headers) {
    whole += embedded_source(file);
  }
  whole += "extern \"C\" __global__ void " + text.name + "(";
  for (size_t i = 0; i < operands.size(); ++i) {
    whole += (i ? ", const " : "const ") + type_name(operands[i].dtype()) + "* " + text.inputs[i];
  }
  for (size_t i = 0; i < dtypes.size(); ++i) {
    whole += ", " + type_name(dtypes[i]) + "* " + text.outputs[i];
  }
  for (const auto& size : sizes) {
    whole += ", int " + size.first;
  }
  whole += ") {\n";
  for (const auto& [name, value] : text.constants) {
    whole += definition(name, value);
  }
  return whole + text.body() + "\n}\n";
}

/// What the program of a text depends on.
std::string key_of(
    const Text& text,
    const std::vector<mx::array>& operands,
    const Sizes& sizes,
    const std::vector<mx::Dtype>& dtypes) {
  std::string key = text.name;
  key.reserve(256);
  auto append = [&](const std::string& part, char last) {
    key += ' ';
    key += part;
    key += last;
  };
  auto letter = [](mx::Dtype dtype) { return char('A' + int(dtype.val())); };
  for (size_t i = 0; i < operands.size(); ++i) append(text.inputs[i], letter(operands[i].dtype()));
  for (size_t i = 0; i < dtypes.size(); ++i) append(text.outputs[i], letter(dtypes[i]));
  for (const auto& size : sizes) append(size.first, ';');
  for (const auto& constant : text.constants) {
    if (auto dtype = std::get_if<mx::Dtype>(&constant.second)) {
      append("", letter(*dtype));
    } else if (auto flag = std::get_if<bool>(&constant.second)) {
      append("", *flag ? 't' : 'f');
    } else {
      append(std::to_string(std::get<int>(constant.second)), ';');
    }
  }
  return key;
}

/// The machine code of a kernel, compiled once.
const std::string& code(
    const Text& text,
    const std::vector<mx::array>& operands,
    const Sizes& sizes,
    const std::vector<mx::Dtype>& dtypes) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::string> compiled;
  const auto key = key_of(text, operands, sizes, dtypes);
  std::lock_guard lock(mutex);
  auto found = compiled.find(key);
  if (found == compiled.end()) {
    const auto whole = program(text, operands, sizes, dtypes);
    found = compiled.emplace(key, nvrtc::compile(text.name, whole, capability())).first;
  }
  return found->second;
}

}  // namespace

bool runs_on(mx::Stream stream) {
  return stream.device == mx::Device::gpu && mx::cu::is_available();
}

std::vector<mx::array> launch(
    const Text& text,
    const std::vector<mx::array>& operands,
    const std::vector<std::pair<std::string, int>>& sizes,
    const std::vector<mx::Shape>& shapes,
    const std::vector<mx::Dtype>& dtypes,
    std::array<int, 3> grid,
    std::array<int, 3> group,
    mx::Stream stream) {
  for (int i = 0; i < 3; ++i) {  // whole blocks: the body checks
    grid[i] = (grid[i] + group[i] - 1) / group[i] * group[i];
  }
  std::vector<mx::fast::ScalarArg> scalars;
  for (const auto& size : sizes) {
    scalars.emplace_back(size.second);
  }
  return mx::fast::precompiled_cuda_kernel(
      text.name,
      code(text, operands, sizes, dtypes),
      operands,
      shapes,
      dtypes,
      scalars,
      {grid[0], grid[1], grid[2]},
      {group[0], group[1], group[2]},
      0,
      std::nullopt,
      true,  // strided inputs are copied first
      stream);
}

}  // namespace dflash::cuda
