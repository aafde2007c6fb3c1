#pragma once

#include <functional>

namespace dflash::cpu {

/// Threads that share a kernel: the machine's cores, or DFLASH_NATIVE_NUM_THREADS.
int threads();

/// Runs work(part, parts) for every part, on the calling thread and the pool's, and returns when
/// all are done. There are at most four parts a thread. What is computed must not depend on the
/// number of parts.
void parallel(int parts, const std::function<void(int part, int parts)>& work);

}  // namespace dflash::cpu
