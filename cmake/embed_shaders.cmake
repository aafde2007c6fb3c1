# Writes a C++ file with the text of every shader and header: cmake -DROOT=... -DOUT=... -P this
#
# Includes between our own files are dropped, since the launcher joins them in order; the hash of all
# texts goes into the names of compiled kernels.
file(GLOB files "${ROOT}/metal/*.h" "${ROOT}/metal/*.metal" "${ROOT}/csrc/gpu/*_on_cuda.h")
list(SORT files)
set(entries "")
set(all "")
foreach(file IN LISTS files)
  get_filename_component(name "${file}" NAME)
  file(READ "${file}" text)
  string(APPEND all "${name}${text}")
  string(REGEX REPLACE "#include [^\n]*\n" "" text "${text}")
  string(REPLACE "using namespace metal;\n" "" text "${text}")
  string(REPLACE "#pragma once\n" "" text "${text}")
  # The text is copied and hashed at every call on CUDA: comments and indentation stay at home.
  string(REGEX REPLACE "[ ]*//[^\n]*" "" text "${text}")
  string(REGEX REPLACE "\n[ \n]+" "\n" text "${text}")
  string(APPEND entries "      {\"${name}\", R\"shader(\n${text})shader\"},\n")
endforeach()
string(SHA256 hash "${all}")
string(SUBSTRING "${hash}" 0 12 hash)
set(cpp "// Generated from metal/ by cmake/embed_shaders.cmake.
#include \"gpu/sources.h\"

#include <stdexcept>
#include <unordered_map>

namespace dflash {

const std::string& embedded_source(const std::string& file) {
  static const std::unordered_map<std::string, std::string> sources = {
${entries}  };
  auto found = sources.find(file);
  if (found == sources.end()) {
    throw std::logic_error(\"no embedded shader \" + file);
  }
  return found->second;
}

const std::string& embedded_hash() {
  static const std::string hash = \"${hash}\";
  return hash;
}

}  // namespace dflash
")
set(old "")
if(EXISTS "${OUT}")
  file(READ "${OUT}" old)
endif()
if(NOT "${cpp}" STREQUAL "${old}")
  file(WRITE "${OUT}" "${cpp}")
endif()
