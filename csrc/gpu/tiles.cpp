#include "tiles.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

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
    if (!known || (value != "1" && value != "2" && value != "4")) {
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

}  // namespace

int tiles_for(const char* name, int chosen, int most) {
  static const std::map<std::string, int> overrides = wanted();
  const auto found = overrides.find(name);
  return std::min(found == overrides.end() ? chosen : found->second, most);
}

}  // namespace dflash
