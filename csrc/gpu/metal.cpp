#include "metal.h"

#include <stdexcept>

#include "sources.h"

#ifdef _METAL_

#include <dlfcn.h>

#include <filesystem>
#include <mutex>

#include "mlx/allocator.h"
#include "mlx/backend/metal/device.h"
#include "mlx/backend/metal/utils.h"

namespace dflash::metal {
namespace {

/// The metallib that a build with Xcode's compiler left beside this extension, or "".
const std::string& metallib() {
  static const std::string path = [] {
    Dl_info info;
    if (!dladdr(reinterpret_cast<const void*>(&metallib), &info)) {
      return std::string();
    }
    auto file = std::filesystem::path(info.dli_fname).parent_path() / "dflash_native.metallib";
    return std::filesystem::exists(file) ? file.string() : std::string();
  }();
  return path;
}

/// Why the metallib is not used, or "".
std::string& refusal() {
  static std::string why;
  return why;
}

/// The metallib, or null: there is none, or this system does not load it (one that was built on
/// macOS 26 does not load on 15).
MTL::Library* prebuilt(mx::metal::Device& device) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (metallib().empty() || !refusal().empty()) {
    return nullptr;
  }
  try {
    return device.get_library("dflash_native_" + embedded_hash(), metallib());
  } catch (const std::exception& error) {
    refusal() = error.what();
    return nullptr;
  }
}

MTL::ComputePipelineState* pipeline(
    mx::Stream stream,
    const std::string& file,
    const std::string& kernel,
    const std::string& instance,
    const std::vector<bool>& constants) {
  auto& device = mx::metal::device(stream.device);
  mx::metal::MTLFCList list;
  std::array<bool, 8> values{};
  std::string hash = kernel + "_" + embedded_hash() + "_";
  for (size_t i = 0; i < constants.size(); ++i) {
    values[i] = constants[i];
    list.emplace_back(&values[i], MTL::DataType::DataTypeBool, i);
    hash += constants[i] ? "t" : "f";
  }
  MTL::Library* library = prebuilt(device);
  if (!library) {
    library = device.get_library("dflash_" + kernel + "_" + embedded_hash(), [&] {
      return "#define DFLASH_JIT 1\n#include <metal_stdlib>\nusing namespace metal;\n" +
             embedded_source("arithmetic.h") + embedded_source("matrix.h") +
             embedded_source(file + ".h") + embedded_source(file + ".metal") +
             "\ntemplate [[host_name(\"" + kernel + "\")]] [[kernel]] decltype(" + instance + ") " +
             instance + ";\n";
    });
  }
  return device.get_kernel(kernel, library, hash, list);
}

MTL::Size size(const std::array<int, 3>& x) {
  return MTL::Size(x[0], x[1], x[2]);
}

}  // namespace

void allocate(std::vector<mx::array>& outputs) {
  for (auto& out : outputs) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }
}

int generation(mx::Stream stream) {
  return mx::metal::device(stream.device).get_architecture_gen();
}

Launch::Launch(
    mx::Stream stream,
    const std::string& file,
    const std::string& kernel,
    const std::string& instance,
    const std::vector<bool>& constants)
    : stream_(stream) {
  mx::metal::get_command_encoder(stream).set_compute_pipeline_state(
      pipeline(stream, file, kernel, instance, constants));
}

void Launch::input(const mx::array& x, int index) {
  mx::metal::get_command_encoder(stream_).set_input_array(x, index);
}

void Launch::output(mx::array& x, int index) {
  mx::metal::get_command_encoder(stream_).set_output_array(x, index);
}

void Launch::scalar(int x, int index) {
  mx::metal::get_command_encoder(stream_).set_bytes(x, index);
}

void Launch::scalar(float x, int index) {
  mx::metal::get_command_encoder(stream_).set_bytes(x, index);
}

void Launch::temporary(const mx::array& x) {
  mx::metal::get_command_encoder(stream_).add_temporary(x);
}

void Launch::threads(std::array<int, 3> grid, std::array<int, 3> group) {
  mx::metal::get_command_encoder(stream_).dispatch_threads(size(grid), size(group));
}

void Launch::threadgroups(std::array<int, 3> grid, std::array<int, 3> group) {
  mx::metal::get_command_encoder(stream_).dispatch_threadgroups(size(grid), size(group));
}

std::string kernel_source() {
  if (metallib().empty()) {
    return "compiled on first use";
  }
  return refusal().empty() ? metallib() : "compiled on first use; the metallib: " + refusal();
}

}  // namespace dflash::metal

#else

namespace dflash::metal {

namespace {
[[noreturn]] void missing() {
  throw std::runtime_error("[dflash_native] this build has no Metal kernels.");
}
}  // namespace

void allocate(std::vector<mx::array>&) {
  missing();
}
int generation(mx::Stream) {
  missing();
}
Launch::Launch(
    mx::Stream stream,
    const std::string&,
    const std::string&,
    const std::string&,
    const std::vector<bool>&)
    : stream_(stream) {
  missing();
}
void Launch::input(const mx::array&, int) {
}
void Launch::output(mx::array&, int) {
}
void Launch::scalar(int, int) {
}
void Launch::scalar(float, int) {
}
void Launch::temporary(const mx::array&) {
}
void Launch::threads(std::array<int, 3>, std::array<int, 3>) {
}
void Launch::threadgroups(std::array<int, 3>, std::array<int, 3>) {
}
std::string kernel_source() {
  return "none";
}

}  // namespace dflash::metal

#endif
