// The shaders and headers of metal/, embedded at build time (cmake/embed_shaders.cmake).
#pragma once

#include <string>

namespace dflash {

/// The text of metal/<file> without its includes, or of gpu/metal_on_cuda.h.
const std::string& embedded_source(const std::string& file);

/// Of all of them: part of every name under which a compiled kernel is cached.
const std::string& embedded_hash();

}  // namespace dflash
