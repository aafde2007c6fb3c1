#include "parallel.h"

#include <algorithm>
#include <condition_variable>
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

class Pool {
 public:
  explicit Pool(int workers) {
    for (int i = 0; i < workers; ++i) {
      try {
        std::thread([this, i] { work(i + 1); }).detach();
      } catch (const std::system_error&) {  // the machine has no more threads: make do with these
        return;
      }
      ++workers_;
    }
  }

  void run(int parts, const std::function<void(int, int)>& job) {
    std::lock_guard<std::mutex> one_at_a_time(callers_);
    parts = std::min(parts, workers_ + 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      parts_ = parts;
      left_ = parts - 1;
      error_ = nullptr;
      ++generation_;
    }
    start_.notify_all();
    attempt(job, 0, parts);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  void attempt(const std::function<void(int, int)>& job, int part, int parts) {
    try {
      job(part, parts);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = std::current_exception();
    }
  }

  void work(int part) {
    long seen = 0;
    for (;;) {
      const std::function<void(int, int)>* job;
      int parts;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        start_.wait(lock, [&] { return generation_ != seen; });
        seen = generation_;
        job = job_;
        parts = parts_;
      }
      if (part >= parts) continue;
      attempt(*job, part, parts);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--left_ == 0) done_.notify_one();
    }
  }

  std::mutex callers_, mutex_;
  std::condition_variable start_, done_;
  const std::function<void(int, int)>* job_ = nullptr;
  std::exception_ptr error_;
  int workers_ = 0, parts_ = 0, left_ = 0;
  long generation_ = 0;
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
  parts = std::min(parts, threads());
  if (parts <= 1) {
    work(0, 1);
  } else {
    pool().run(parts, work);
  }
}

}  // namespace dflash::cpu
