#include "launch.h"

#include <chrono>
#include <thread>

#include "mlx/scheduler.h"

namespace dflash::cpu {

std::atomic<bool> failed = false;

void recount(mx::Stream stream) {
  mx::synchronize(stream);  // throws an error that has not surfaced yet: another call comes
  failed = false;
  auto& scheduler = mx::scheduler::scheduler();
  for (int i = 0; i < 20 && scheduler.n_active_tasks() > 0; ++i) {  // of other streams
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (int i = scheduler.n_active_tasks(); i > 0; --i) {
    scheduler.notify_task_completion(stream);
  }
}

}  // namespace dflash::cpu
