// The emulator's inside: simt.cpp schedules threads, simd.cpp computes SIMD-group operations,
// builtins.cpp gives both the names that Apple's compiler calls them by.
#pragma once
#include <cstdint>
#include <cstring>

typedef _Float16 half;
typedef unsigned uint;

// What a kernel's entry function is given; shim/entry.h knows the same layout.
struct Context {
  uint64_t buf[31], tg[31];                  // buffers; threadgroup memory set by the host
  uint32_t tpg[3], tgp[3], tpt[3];           // thread in grid, group in grid, thread in group
  uint32_t tptg[3], tgpg[3], tpgrid[3];      // threads of a group, groups and threads of the grid
  uint32_t tit, sg, lane, nsg, sgsize, dsg;  // thread index, SIMD group, lane, and their counts
  uint32_t qlane, quad;                      // lane in its quad group, quad group
};

// clang-format off
enum Op {
  SUM_F, PRODUCT_F, MIN_F, MAX_F,
  INCLUSIVE_SUM_F, EXCLUSIVE_SUM_F, INCLUSIVE_PRODUCT_F, EXCLUSIVE_PRODUCT_F,
  SUM_I, PRODUCT_I, MIN_I, MAX_I,
  INCLUSIVE_SUM_I, EXCLUSIVE_SUM_I, INCLUSIVE_PRODUCT_I, EXCLUSIVE_PRODUCT_I,
  AND, OR, XOR, SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, ROTATE_UP, ROTATE_DOWN,
  FILL_UP, FILL_DOWN, BROADCAST, BROADCAST_FIRST, ALL, ANY, BALLOT, IS_FIRST,
  SIMD_BARRIER, MATRIX_MULTIPLY, QUAD_SUM_F
};
// clang-format on

enum State : uint8_t { READY, AT_SIMD_OP, AT_BARRIER, DONE };

// A GPU thread. While it waits at a SIMD-group operation: which, called from where, with what.
struct Fiber {
  void* sp;
  Context ctx;
  State state;
  Op op;
  const void* site;
  uint64_t a[3], result;
  int arg, arg2;
};

const Context& current_context();
int random_below(int n);
// Ends the dispatch; the message names thread `fiber` (default: the current one).
void fail(const char* what, const Fiber* fiber = nullptr);

// A rendezvous of the SIMD group's live lanes; `site` is where the kernel called it.
uint64_t simd_op(Op op, uint64_t a0, uint64_t a1, uint64_t a2, int arg, int arg2, const void* site);
// A rendezvous of the threadgroup's live threads.
void threadgroup_barrier(const void* site);
// All live lanes of a SIMD group wait, `count` threads long: compute their results.
void resolve(Fiber* lane, int count, bool shuffled);

// simdgroup_matrix: lane l holds (row, col) and (row, col + 1)
inline int matrix_row(int l) {
  return ((l >> 4) & 1) * 4 + ((l >> 1) & 3);
}
inline int matrix_col(int l) {
  return ((l >> 3) & 1) * 4 + (l & 1) * 2;
}
inline float as_float(uint64_t v) {
  uint32_t low = (uint32_t)v;
  float x;
  memcpy(&x, &low, 4);
  return x;
}
inline uint64_t bits(float x) {
  uint32_t v;
  memcpy(&v, &x, 4);
  return v;
}
