// Runs one compute dispatch on one CPU thread. Every GPU thread is a fiber; a SIMD-group operation
// or a barrier is a rendezvous of the fibers concerned. Reports divergence and deadlock. Schedules:
// 0 = threads in order, 1 = last first, 2 = random, which also shuffles the order of reductions.
#include "simt.h"

#include <signal.h>
#include <sys/mman.h>
#include <xmmintrin.h>

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

extern "C" void fiber_switch(void** save, void* to);
__asm__(R"(
.text
.globl fiber_switch
.hidden fiber_switch
.type fiber_switch,@function
fiber_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

typedef void (*Entry)(const Context*);
struct SimdGroup {
  int live, waiting;
};

static const size_t STACK_BYTES = 256 << 10;
static std::vector<Fiber> fibers;
static std::vector<SimdGroup> simd_groups;
static std::vector<int> ready;
static int ready_head, current, live_count, barrier_count;
static void* main_sp;
static Entry entry;
static int schedule, failed;
static char message[512];
static uint64_t random_state, random_seed = 88172645463325252ull;

static uint64_t random_next() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}
int random_below(int n) {
  return random_next() % n;
}
const Context& current_context() {
  return fibers[current].ctx;
}
void fail(const char* what, const Fiber* fiber) {
  if (failed) return;
  failed = 1;
  const Context& c = fiber ? fiber->ctx : current_context();
  snprintf(
      message,
      sizeof message,
      "%s (threadgroup %u,%u,%u thread %u)",
      what,
      c.tgp[0],
      c.tgp[1],
      c.tgp[2],
      c.tit);
}
// Closed memory was touched: the dispatch ends, its fibers are left as they are.
static uint64_t fault_address;
static void on_fault(int, siginfo_t* info, void*) {
  fault_address = (uint64_t)info->si_addr;
  fail("access outside of memory");
  fiber_switch(&fibers[current].sp, main_sp);
}
static bool none_ready() {
  return ready_head >= (int)ready.size();
}
static void make_ready(int i) {
  fibers[i].state = READY;
  ready.push_back(i);
}
static int take_ready() {
  if (schedule == 1) {
    int i = ready.back();
    ready.pop_back();
    return i;
  }
  if (schedule == 2)
    std::swap(ready[ready_head], ready[ready_head + random_below(ready.size() - ready_head)]);
  int i = ready[ready_head++];
  if (ready_head > 4096) {
    ready.erase(ready.begin(), ready.begin() + ready_head);
    ready_head = 0;
  }
  return i;
}
static void run_another() {  // leave the current fiber; comes back when it is scheduled again
  int me = current;
  if (none_ready()) {
    fiber_switch(&fibers[me].sp, main_sp);
    return;
  }
  current = take_ready();
  if (current != me) fiber_switch(&fibers[me].sp, fibers[current].sp);
}

static void resolve_group(int group) {
  const int base = group * 32;
  resolve(&fibers[base], fibers.size() - base, schedule == 2);
}
static void release_group(int group, int except = -1) {
  for (int l = group * 32; l < group * 32 + 32 && l < (int)fibers.size(); l++)
    if (l != except && fibers[l].state == AT_SIMD_OP) make_ready(l);
}
static void release_barrier_if_complete() {
  if (!live_count || barrier_count != live_count) return;
  barrier_count = 0;
  const void* site = nullptr;
  for (int i = 0; i < (int)fibers.size(); i++) {
    if (fibers[i].state != AT_BARRIER) continue;
    if (!site)
      site = fibers[i].site;
    else if (site != fibers[i].site) {
      fail("threadgroup_barrier reached at different places", &fibers[i]);
    }
    make_ready(i);
  }
}
uint64_t simd_op(
    Op op, uint64_t a0, uint64_t a1, uint64_t a2, int arg, int arg2, const void* site) {
  const int id = current, group = id / 32;
  Fiber& me = fibers[id];
  me.op = op;
  me.site = site;
  me.arg = arg;
  me.arg2 = arg2;
  me.a[0] = a0;
  me.a[1] = a1;
  me.a[2] = a2;
  me.state = AT_SIMD_OP;
  if (++simd_groups[group].waiting == simd_groups[group].live) {
    resolve_group(group);
    simd_groups[group].waiting = 0;
    release_group(group, schedule == 0 ? id : -1);
    if (schedule == 0) {
      me.state = READY;
      return me.result;  // in order: the last to arrive goes on at once
    }
  }
  run_another();
  return fibers[id].result;
}
void threadgroup_barrier(const void* site) {
  fibers[current].state = AT_BARRIER;
  fibers[current].site = site;
  barrier_count++;
  release_barrier_if_complete();
  run_another();
}
static void fiber_main() {
  entry(&fibers[current].ctx);
  const int id = current, group = id / 32;
  fibers[id].state = DONE;
  live_count--;
  SimdGroup& g = simd_groups[group];
  g.live--;
  if (g.live && g.waiting == g.live) {
    resolve_group(group);
    g.waiting = 0;
    release_group(group);
  }
  release_barrier_if_complete();
  run_another();
  __builtin_unreachable();
}

// The kernels' threadgroup variables lie in a section of their own; this one makes sure of it.
__attribute__((section("msltg"), used, aligned(16))) static char tg_section[16];
extern "C" char __start_msltg[], __stop_msltg[];

// A process may have 65,530 mappings, a stack takes two, and every library has stacks of its own.
static const size_t KEPT_STACKS = 64;
static std::vector<char*> stacks;

static char* stack_of(int i) {
  while ((int)stacks.size() <= i) {
    char* p = (char*)mmap(
        0,
        STACK_BYTES + 4096,
        PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
        -1,
        0);
    if (p == MAP_FAILED) {
      perror("a fiber's stack");
      abort();
    }
    mprotect(p, 4096, PROT_NONE);
    stacks.push_back(p + 4096);
  }
  return stacks[i];
}
static void release_stacks() {
  for (; stacks.size() > KEPT_STACKS; stacks.pop_back())
    munmap(stacks.back() - 4096, STACK_BYTES + 4096);
}

struct Dispatch {
  const uint64_t* buffers;
  uint64_t tg_address[31];
  uint32_t threads[3], groups[3], width[3];  // of the whole grid; threads of a full group
};

static void start_threadgroup(const Dispatch& d, const uint32_t g[3], const uint32_t w[3]) {
  const int n = w[0] * w[1] * w[2];
  fibers.resize(n);
  simd_groups.assign((n + 31) / 32, SimdGroup{0, 0});
  ready.clear();
  ready_head = 0;
  live_count = n;
  barrier_count = 0;
  for (int t = 0; t < n; t++) {
    Fiber& q = fibers[t];
    Context& c = q.ctx;
    const uint32_t l[3] = {t % w[0], t / w[0] % w[1], t / (w[0] * w[1])};
    memcpy(c.buf, d.buffers, sizeof c.buf);
    memcpy(c.tg, d.tg_address, sizeof c.tg);
    for (int i = 0; i < 3; i++) {
      c.tpt[i] = l[i];
      c.tgp[i] = g[i];
      c.tpg[i] = g[i] * d.width[i] + l[i];
      c.tptg[i] = w[i];
      c.tgpg[i] = d.groups[i];
      c.tpgrid[i] = d.threads[i];
    }
    c.tit = t;
    c.sg = t / 32;
    c.lane = t % 32;
    c.sgsize = 32;
    c.nsg = c.dsg = (n + 31) / 32;
    c.qlane = t % 4;
    c.quad = t / 4;
    simd_groups[t / 32].live++;
    void** sp = (void**)(stack_of(t) + STACK_BYTES - 64);
    *--sp = nullptr;
    *--sp = (void*)fiber_main;
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    q.sp = sp;
    make_ready(t);
  }
}
static void run_threadgroup() {
  while (live_count && !failed) {
    if (none_ready()) {
      int waiting = 0;
      for (auto& q : fibers) waiting += q.state == AT_SIMD_OP;
      char m[200];
      snprintf(
          m,
          sizeof m,
          "deadlock: %d live threads, %d at the threadgroup barrier, %d at SIMD-group operations",
          live_count,
          barrier_count,
          waiting);
      int stuck = 0;
      while (fibers[stuck].state == DONE) stuck++;
      fail(m, &fibers[stuck]);
      break;
    }
    current = take_ready();
    fiber_switch(&main_sp, fibers[current].sp);
  }
}

API const char* msl_error() {
  return message;
}
// The address at which the last dispatch touched closed memory, or 0.
API uint64_t msl_fault() {
  return fault_address;
}
API void msl_seed(uint64_t seed) {
  random_seed = seed ? seed : 88172645463325252ull;
}
// `grid` counts threads, or threadgroups if grid_is_threadgroups. Returns 0, or 1 and msl_error()
// says why.
API int msl_run(
    void* fn,
    const uint64_t* buffers,
    const uint32_t* tg_bytes,
    const uint32_t* grid,
    const uint32_t* width,
    int grid_is_threadgroups,
    int schedule_) {
  entry = (Entry)fn;
  schedule = schedule_;
  failed = 0;
  message[0] = 0;
  fault_address = 0;
  random_state = random_seed;
  Dispatch d = {};
  d.buffers = buffers;
  for (int i = 0; i < 3; i++) {
    d.width[i] = width[i];
    d.groups[i] = grid_is_threadgroups ? grid[i] : (grid[i] + width[i] - 1) / width[i];
    d.threads[i] = grid_is_threadgroups ? grid[i] * width[i] : grid[i];
  }
  std::vector<std::vector<char>> tg_memory(31);
  for (int i = 0; i < 31; i++) {
    if (!tg_bytes || !tg_bytes[i]) continue;
    tg_memory[i].resize(tg_bytes[i] + 64);
    d.tg_address[i] = ((uint64_t)tg_memory[i].data() + 63) & ~63ull;
  }
  struct sigaction ours = {}, theirs;
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, &theirs);
  const uint32_t csr = _mm_getcsr();
  _mm_setcsr(csr | 0x8040);  // flush denormals, as the GPU does for float
  for (uint32_t z = 0; z < d.groups[2] && !failed; z++)
    for (uint32_t y = 0; y < d.groups[1] && !failed; y++)
      for (uint32_t x = 0; x < d.groups[0] && !failed; x++) {
        uint32_t g[3] = {x, y, z}, w[3];  // the last group of a row may be smaller
        for (int i = 0; i < 3; i++)
          w[i] = (g[i] + 1) * width[i] > d.threads[i] ? d.threads[i] - g[i] * width[i] : width[i];
        memset(__start_msltg, 0xff, __stop_msltg - __start_msltg);
        for (auto& m : tg_memory)
          if (!m.empty()) memset(m.data(), 0xff, m.size());
        start_threadgroup(d, g, w);
        run_threadgroup();
      }
  release_stacks();
  _mm_setcsr(csr);
  sigaction(SIGSEGV, &theirs, nullptr);
  return failed;
}
