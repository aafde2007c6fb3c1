#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include <unistd.h>

namespace dflash::cpu {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kPartsOfThread = 4;  // one that the system holds up leaves the others something to do
constexpr auto kSpin =
    std::chrono::microseconds(50);  // a sleeper wakes in 5 to 10, and pays a call

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Waits for `ready` without sleeping, for a while; whether it came.
template <typename Ready>
bool spin(bool allowed, Ready&& ready) {
  if (ready()) return true;
  if (!allowed) return false;
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      pause();
      if (ready()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

/// Threads that take the parts of one call after another, in order; so does the caller, who need
/// not wait for a thread that is late.
class Pool {
 public:
  explicit Pool(int workers) : spins_(workers < int(std::thread::hardware_concurrency())) {
    for (int i = 0; i < workers; ++i) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (const std::system_error&) {  // the machine has no more threads: make do with these
        return;
      }
    }
  }

  void run(int parts, const std::function<void(int, int)>& job) {
    std::lock_guard<std::mutex> one_at_a_time(callers_);
    job_ = &job;
    error_ = nullptr;
    left_.store(parts);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      state_.store(State(state_.load()).next_call(parts).bits);
    }
    for (int i = 1; i < parts; ++i) start_.notify_one();
    while (take()) {
    }
    const auto done = [this] { return left_.load() == 0; };
    if (!spin(spins_, done)) {
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, done);
    }
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  /// The call's number, its parts and the next of them: one word, so that who takes a part knows
  /// that the call waits for it.
  struct State {
    uint64_t bits;
    explicit State(uint64_t bits) : bits(bits) {
    }
    int next() const {
      return int(bits & 0xffff);
    }
    int parts() const {
      return int(bits >> 16 & 0xffff);
    }
    State next_call(int parts) const {
      return State(((bits >> 32) + 1) << 32 | uint64_t(parts) << 16);
    }
  };

  /// Does one part, if one is left.
  bool take() {
    State state(state_.load());
    do {
      if (state.next() >= state.parts()) return false;
    } while (!state_.compare_exchange_weak(state.bits, state.bits + 1));
    try {
      (*job_)(state.next(), state.parts());
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = std::current_exception();
    }
    if (left_.fetch_sub(1) == 1) {
      std::lock_guard<std::mutex> lock(mutex_);
      done_.notify_one();
    }
    return true;
  }

  void work() {
    const auto called = [this] {
      const State state(state_.load());
      return state.next() < state.parts();
    };
    for (;;) {
      if (!spin(spins_, called)) {
        std::unique_lock<std::mutex> lock(mutex_);
        start_.wait(lock, called);
      }
      while (take()) {
      }
    }
  }

  std::mutex callers_, mutex_;
  std::condition_variable start_, done_;
  const std::function<void(int, int)>* job_ = nullptr;
  std::exception_ptr error_;
  const bool spins_;
  std::atomic<int> left_{0};  // parts that are not done
  std::atomic<uint64_t> state_{0};
};

/// The pool lives as long as the process; a forked child, which inherits no threads, makes its own.
Pool& pool() {
  static std::mutex mutex;
  static Pool* current = nullptr;
  static long owner = 0;
  std::lock_guard<std::mutex> lock(mutex);
  const long process = getpid();
  if (!current || owner != process) {
    current = new Pool(threads() - 1);
    owner = process;
  }
  return *current;
}

}  // namespace

int threads() {
  static const int count = [] {
    const char* wanted = std::getenv("DFLASH_NATIVE_NUM_THREADS");
    if (!wanted) {
      return std::max(1, int(std::thread::hardware_concurrency()));
    }
    char* end = nullptr;
    const long asked = std::strtol(wanted, &end, 10);
    if (end == wanted || *end || asked < 1 || asked > kMostThreads) {
      throw std::invalid_argument(
          "[DFLASH_NATIVE_NUM_THREADS] expected a number in 1 .. " + std::to_string(kMostThreads) +
          " but got \"" + wanted + "\".");
    }
    return int(asked);
  }();
  return count;
}

void parallel(int parts, const std::function<void(int part, int parts)>& work) {
  parts = std::min(parts, kPartsOfThread * threads());
  if (parts <= 1 || threads() == 1) {
    work(0, 1);
  } else {
    pool().run(parts, work);
  }
}

}  // namespace dflash::cpu
