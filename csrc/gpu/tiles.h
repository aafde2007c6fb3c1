// How many tiles a SIMD group works on: a matter of speed by chip and shape, never of bits.
#pragma once

namespace dflash {

/// `chosen`, or what DFLASH_NATIVE_TILES says for `name`, as in "matmul=2,attention=4": 1, 2 or 4,
/// at most `most`.
int tiles_for(const char* name, int chosen, int most);

}  // namespace dflash
