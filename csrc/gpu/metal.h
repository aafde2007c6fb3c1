// Launching on Metal: library and pipeline lookup, arguments, grid.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "mlx/array.h"

namespace mx = mlx::core;

namespace dflash::metal {

void allocate(std::vector<mx::array>& outputs);

/// Of the GPU: 13 is M1, 14 M2, and so on.
int generation(mx::Stream stream);

/// One dispatch of one kernel.
class Launch {
 public:
  /// `file`: the stem in metal/; `kernel`: the host name; `instance`: the template instance that
  /// has it; `constants`: boolean function constants 0, 1, ...
  Launch(
      mx::Stream stream,
      const std::string& file,
      const std::string& kernel,
      const std::string& instance,
      const std::vector<bool>& constants);
  void input(const mx::array& x, int index);
  void output(mx::array& x, int index);
  void scalar(int x, int index);
  void scalar(float x, int index);
  /// Memory that lives until the dispatch has run.
  void temporary(const mx::array& x);
  void threads(std::array<int, 3> grid, std::array<int, 3> group);
  void threadgroups(std::array<int, 3> grid, std::array<int, 3> group);

 private:
  mx::Stream stream_;
};

/// Where the kernels come from: the metallib beside the extension, or "compiled on first use".
std::string kernel_source();

}  // namespace dflash::metal
