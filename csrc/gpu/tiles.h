// How much a SIMD group works on: a matter of speed by chip and shape, never of bits.
#pragma once

#include "mlx/stream.h"

namespace mx = mlx::core;

namespace dflash {

struct Tiles {
  int matmul;     ///< tiles of 16 outputs of a dense product with many outputs: 1 or 2
  int attention;  ///< SIMD groups that share staged keys and values: 1, 2 or 4
};

/// The chip's, or what DFLASH_NATIVE_TILES says, as in "matmul=2,attention=4".
Tiles tiles_of(mx::Stream stream);

}  // namespace dflash
