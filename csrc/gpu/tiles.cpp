#include "tiles.h"

#include <cstdlib>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

#include "cuda.h"
#include "metal.h"

namespace dflash {
namespace {

std::map<std::string, int> wanted() {
  std::map<std::string, int> found;
  const char* text = std::getenv("DFLASH_NATIVE_TILES");
  std::istringstream parts(text ? text : "");
  for (std::string part; std::getline(parts, part, ',');) {
    const auto at = part.find('=');
    const std::string name = part.substr(0, at);
    const std::string value = at == std::string::npos ? "" : part.substr(at + 1);
    const bool known = name == "matmul" || name == "attention";
    const bool sized = value == "1" || value == "2" || (value == "4" && name == "attention");
    if (!known || !sized) {
      throw std::invalid_argument(
          std::string(
              "[DFLASH_NATIVE_TILES] expected matmul= or attention= with 1, 2 or 4, as in "
              "\"matmul=2,attention=4\", but got \"") +
          text + "\".");
    }
    found[name] = value[0] - '0';
  }
  return found;
}

/// By the generation of Apple's GPUs: 13 is M1, 14 M2, 15 M3, 16 M4, 17 M5. Nobody has measured
/// them: older chips, which have fewer registers to a thread at full occupancy, get the smaller
/// shapes.
Tiles of_chip(mx::Stream stream) {
  if (!cuda::runs_on(stream) && metal::generation(stream) < 15) {
    return {.matmul = 1, .attention = 2};
  }
  return {.matmul = 2, .attention = 4};  // measured on an H200
}

}  // namespace

Tiles tiles_of(mx::Stream stream) {
  static const std::map<std::string, int> overrides = wanted();
  Tiles tiles = of_chip(stream);
  if (auto found = overrides.find("matmul"); found != overrides.end()) {
    tiles.matmul = found->second;
  }
  if (auto found = overrides.find("attention"); found != overrides.end()) {
    tiles.attention = found->second;
  }
  return tiles;
}

}  // namespace dflash
