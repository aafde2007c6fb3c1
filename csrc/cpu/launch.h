// Queueing a CPU kernel on an MLX stream.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"

#include "../common.h"
#include "parallel.h"

namespace dflash::cpu {

inline void allocate(std::vector<mx::array>& outputs) {
  for (auto& out : outputs) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }
}

/// Whether work has failed since `recount`.
extern std::atomic<bool> failed;

/// Puts MLX's count of running tasks right. MLX 0.32.4 adds to it and then throws where an error of
/// earlier work surfaces while it queues every tenth operation; once the count is eleven too high,
/// it waits for ever.
void recount(mx::Stream stream);

/// `work` runs on the stream's thread, after what was queued before it. If it throws, the outputs
/// are filled with NaN and the error surfaces at an evaluation on that stream.
template <typename Work>
void dispatch(mx::Stream stream, std::vector<mx::array>& outputs, Work&& work) {
  std::vector<std::pair<char*, size_t>> memory;
  for (auto& out : outputs) {
    memory.emplace_back(out.data<char>(), out.nbytes());
  }
  if (failed.load(std::memory_order_relaxed)) recount(stream);
  mx::cpu::get_command_encoder(stream).dispatch([memory, work = std::forward<Work>(work)] {
    try {
      work();
    } catch (...) {
      failed = true;
      for (auto [data, bytes] : memory) {
        std::memset(data, 0xff, bytes);  // NaN in each of the three dtypes
      }
      throw;
    }
  });
}

/// Shares a kernel among the threads, in more parts for more multiply-adds: a part takes some
/// microseconds, several times what handing it over does.
inline void share(size_t multiply_adds, const std::function<void(int, int)>& kernel) {
  constexpr size_t kWorthAPart = 1 << 16, kMost = 1 << 15;
  parallel(int(std::min(1 + multiply_adds / kWorthAPart, kMost)), kernel);
}

/// Refuses device values outside 0 .. limit.
inline void expect_range(
    const char* op, const char* name, const int* values, int count, int limit) {
  for (int i = 0; i < count; ++i) {
    if (values[i] < 0 || values[i] > limit) {
      refuse(op, "expected ", name, "[", i, "] in 0 .. ", limit, " but got ", values[i]);
    }
  }
}

}  // namespace dflash::cpu
