#include "nvrtc.h"

#include <dlfcn.h>

#include <stdexcept>

namespace dflash::nvrtc {
namespace {

using Program = void*;

/// The library, whose interface is the same in CUDA 12 and 13.
class Library {
 public:
  Library() {
    for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) {
      if (!handle_) handle_ = dlopen(name, RTLD_NOW | RTLD_NOLOAD);  // MLX's own
    }
    if (!handle_) throw std::runtime_error("[dflash_native] expected MLX to have loaded NVRTC.");
  }

  template <typename... Args>
  int call(const char* name, Args... args) const {
    auto function = reinterpret_cast<int (*)(Args...)>(dlsym(handle_, name));
    if (!function) throw std::runtime_error(std::string("[dflash_native] NVRTC has no ") + name);
    return function(args...);
  }

  template <typename... Args>
  void check(const char* name, Args... args) const {
    if (int error = call(name, args...)) {
      throw std::runtime_error(
          std::string("[dflash_native] ") + name + " failed with error " + std::to_string(error));
    }
  }

 private:
  void* handle_ = nullptr;
};

}  // namespace

std::string compile(const std::string& name, const std::string& text, int capability) {
  static const Library library;
  Program program;
  const auto file = name + ".cu";
  const char* const* none = nullptr;
  library.check("nvrtcCreateProgram", &program, text.c_str(), file.c_str(), 0, none, none);
  // As MLX does: what a later chip of the generation lacks may be used.
  const auto target =
      "--gpu-architecture=sm_" + std::to_string(capability) + (capability >= 90 ? "a" : "");
  const char* options[] = {target.c_str(), "--std=c++17", "--device-as-default-execution-space"};
  const int failed = library.call("nvrtcCompileProgram", program, 3, &options[0]);
  size_t size = 0;
  std::string result;
  if (failed) {
    library.check("nvrtcGetProgramLogSize", program, &size);
    result.resize(size);
    library.check("nvrtcGetProgramLog", program, result.data());
  } else {
    library.check("nvrtcGetCUBINSize", program, &size);
    result.resize(size);
    library.check("nvrtcGetCUBIN", program, result.data());
  }
  library.check("nvrtcDestroyProgram", &program);
  if (failed) {
    throw std::runtime_error("[dflash_native] " + file + " does not compile:\n" + result);
  }
  return result;
}

}  // namespace dflash::nvrtc
