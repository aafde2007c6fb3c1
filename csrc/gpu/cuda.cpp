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

/// A kernel under construction: parameters are the inputs, the outputs, and then each size of the
/// shapes that the body reads.
struct Entry {
  std::string parameters, body;
  std::vector<mx::fast::ScalarArg> sizes;

  Entry(
      const std::vector<std::string>& inputs,
      const std::vector<std::string>& outputs,
      const std::string& text,
      const std::vector<mx::array>& operands,
      const std::vector<mx::Dtype>& dtypes,
      const std::vector<std::pair<std::string, mx::fast::TemplateArg>>& constants) {
    std::string size_parameters;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto shape = inputs[i] + "_shape";
      parameters += (i ? ", const " : "const ") + type_name(operands[i].dtype()) + "* " + inputs[i];
      if (text.find(shape + "[") == std::string::npos) continue;
      std::string list;
      for (int axis = 0; axis < operands[i].ndim(); ++axis) {
        const auto size = shape + std::to_string(axis);
        size_parameters += ", int " + size;
        list += (axis ? ", " : "") + size;
        sizes.emplace_back(operands[i].shape(axis));
      }
      body += "const int " + shape + "[] = {" + list + "};\n";
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      parameters += ", " + type_name(dtypes[i]) + "* " + outputs[i];
    }
    parameters += size_parameters;
    for (const auto& [name, value] : constants) {
      body += definition(name, value);
    }
    body += text;
  }
};

int capability() {
  static const int found = [] {
    const auto& info = mx::gpu::device_info(0);
    auto number = [&](const char* key) { return int(std::get<size_t>(info.at(key))); };
    return 10 * number("compute_capability_major") + number("compute_capability_minor");
  }();
  return found;
}

/// The machine code of a kernel, compiled once.
const std::string& code(
    const std::string& name, const std::vector<std::string>& headers, const Entry& entry) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::string> compiled;
  const auto key = name + "(" + entry.parameters + ")" + entry.body;
  std::lock_guard lock(mutex);
  auto found = compiled.find(key);
  if (found == compiled.end()) {
    std::string text = embedded_source("metal_on_cuda.h");
    for (const auto& file : headers) {
      text += embedded_source(file);
    }
    text += "extern \"C\" __global__ void " + name + "(" + entry.parameters + ") {\n" + entry.body +
            "\n}\n";
    found = compiled.emplace(key, nvrtc::compile(name, text, capability())).first;
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
  const Entry entry(inputs, outputs, body, operands, dtypes, constants);
  return mx::fast::precompiled_cuda_kernel(
      name,
      code(name, headers, entry),
      operands,
      shapes,
      dtypes,
      entry.sizes,
      {grid[0], grid[1], grid[2]},
      {group[0], group[1], group[2]},
      0,
      std::nullopt,
      true,  // strided inputs are copied first
      stream);
}

}  // namespace dflash::cuda
