// CUDA texts to machine code, without a CUDA toolkit.
#pragma once

#include <string>

namespace dflash::nvrtc {

/// The machine code of `text` for a device of this compute capability, 90 for 9.0. It is compiled
/// by the library that MLX has loaded; std::runtime_error with the compiler's words if it fails.
std::string compile(const std::string& name, const std::string& text, int capability);

}  // namespace dflash::nvrtc
