// Functions of several threads: barriers, SIMD groups, matrices, atomics.
#pragma once
// clang-format off

namespace metal {
// synchronisation
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
INL constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }
enum memory_order { memory_order_relaxed = 0 };
void __wg_barrier(int flags, int scope) AIR("wg.barrier") CONVERGENT;
void __sg_barrier(int flags, int scope) AIR("simdgroup.barrier") CONVERGENT;
INL void threadgroup_barrier(mem_flags f) { __wg_barrier((int)f, 1); }
INL void simdgroup_barrier(mem_flags f) { __sg_barrier((int)f, 4); }

// SIMD-group functions
#define MSL_SG1(f, T, S) T f(T) AIR(#f "." S) CONVERGENT;
#define MSL_SG2(f, T, S) T f(T, ushort) AIR(#f "." S) CONVERGENT;
#define MSL_SIMD(T, S) \
  MSL_SG1(simd_sum, T, S) MSL_SG1(simd_product, T, S) \
  MSL_SG1(simd_min, T, S) MSL_SG1(simd_max, T, S) \
  MSL_SG1(simd_prefix_inclusive_sum, T, S) MSL_SG1(simd_prefix_exclusive_sum, T, S) \
  MSL_SG1(simd_prefix_inclusive_product, T, S) MSL_SG1(simd_prefix_exclusive_product, T, S) \
  MSL_SG2(simd_shuffle, T, S) MSL_SG2(simd_shuffle_xor, T, S) \
  MSL_SG2(simd_shuffle_up, T, S) MSL_SG2(simd_shuffle_down, T, S) \
  MSL_SG2(simd_shuffle_rotate_up, T, S) MSL_SG2(simd_shuffle_rotate_down, T, S) \
  MSL_SG2(simd_broadcast, T, S) MSL_SG1(simd_broadcast_first, T, S) \
  T __fill_up(T, T, ushort, ushort) AIR("simd_shuffle_and_fill_up." S) CONVERGENT; \
  T __fill_down(T, T, ushort, ushort) AIR("simd_shuffle_and_fill_down." S) CONVERGENT; \
  INL T simd_shuffle_and_fill_up(T x, T fill, ushort delta, ushort modulo = 32) { \
    return __fill_up(x, fill, delta, modulo); \
  } \
  INL T simd_shuffle_and_fill_down(T x, T fill, ushort delta, ushort modulo = 32) { \
    return __fill_down(x, fill, delta, modulo); \
  } \
  MSL_SG1(quad_sum, T, S)
MSL_SIMD(float, "f32") MSL_SIMD(half, "f16")
MSL_SIMD(int, "s.i32") MSL_SIMD(uint, "u.i32")
MSL_SIMD(short, "s.i16") MSL_SIMD(ushort, "u.i16") MSL_SIMD(char, "s.i8") MSL_SIMD(uchar, "u.i8")
#define MSL_SIMD_BITS(T, S) MSL_SG1(simd_and, T, S) MSL_SG1(simd_or, T, S) MSL_SG1(simd_xor, T, S)
MSL_SIMD_BITS(int, "s.i32") MSL_SIMD_BITS(uint, "u.i32") MSL_SIMD_BITS(ushort, "u.i16")
#define MSL_SHUFFLE_V(f, T, N) INL T##N f(T##N v, ushort n) MSL_EACH(T, N, f(v[i], n))
#define MSL_SIMD_VN(T, N) \
  MSL_SHUFFLE_V(simd_shuffle, T, N) MSL_SHUFFLE_V(simd_shuffle_xor, T, N) \
  MSL_SHUFFLE_V(simd_shuffle_up, T, N) MSL_SHUFFLE_V(simd_shuffle_down, T, N) \
  MSL_VN1(T, N, simd_sum) MSL_VN1(T, N, simd_max) \
  INL T##N simd_shuffle_and_fill_up(T##N v, T##N f, ushort n) \
    MSL_EACH(T, N, simd_shuffle_and_fill_up(v[i], f[i], n))
#define MSL_SIMD_V(T) MSL_SIMD_VN(T, 2) MSL_SIMD_VN(T, 3) MSL_SIMD_VN(T, 4)
MSL_SIMD_V(float) MSL_SIMD_V(half) MSL_SIMD_V(int)
MSL_SIMD_V(uint) MSL_SIMD_V(ushort) MSL_SIMD_V(short)
bool simd_all(bool) AIR("simd_all") CONVERGENT;
bool simd_any(bool) AIR("simd_any") CONVERGENT;
bool simd_is_first() AIR("simd_is_first") CONVERGENT;
ulong __ballot(bool) AIR("simd_ballot.i64") CONVERGENT;
struct simd_vote {
  typedef ulong vote_t;
  vote_t v;
  explicit constexpr operator vote_t() const thread { return v; }
  bool all() const thread { return v == 0xffffffffu; }
  bool any() const thread { return v != 0; }
};
INL simd_vote simd_ballot(bool b) { simd_vote r; r.v = __ballot(b); return r; }
template <class T> using uniform = T;
template <class T> INL bool is_uniform(T) { return false; }
template <class T> INL constexpr T make_uniform(T x) { return x; }
ushort get_simdgroup_size() AIR("get_simdgroup_size.i16");

// simdgroup_matrix: each lane holds two neighbours of one row of the 8x8 matrix
void __rt_mma_f32(
    thread float* d, thread const float* a, thread const float* b, thread const float* c)
    __asm__("rt_mma_f32") CONVERGENT;
uint __rt_lane() __asm__("rt_lane");
INL ulong __matrix_row(uint lane) { return ((lane >> 4) & 1) * 4 + ((lane >> 1) & 3); }
INL ulong __matrix_col(uint lane) { return ((lane >> 3) & 1) * 4 + (lane & 1) * 2; }
template <class T, int R, int C> struct simdgroup_matrix;
template <class T> struct simdgroup_matrix<T, 8, 8> {
  typedef T elem;
  vec<T, 2> t;
  simdgroup_matrix() thread {}
  explicit simdgroup_matrix(T diagonal) thread {
    const uint lane = __rt_lane();
    const ulong r = __matrix_row(lane), c = __matrix_col(lane);
    t.x = r == c ? diagonal : (T)0;
    t.y = r == c + 1 ? diagonal : (T)0;
  }
  thread vec<T, 2>& thread_elements() thread { return t; }
  const thread vec<T, 2>& thread_elements() const thread { return t; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int N> INL simdgroup_matrix<T, N, N> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, N, N> m;
  m.t.x = v;
  m.t.y = v;
  return m;
}
#define MSL_MATRIX(T) simdgroup_matrix<T, 8, 8>
template <class D, class A, class B, class C>
INL void simdgroup_multiply_accumulate(
    thread MSL_MATRIX(D)& d, MSL_MATRIX(A) a, MSL_MATRIX(B) b, MSL_MATRIX(C) c) {
  float fa[2] = {(float)a.t.x, (float)a.t.y}, fb[2] = {(float)b.t.x, (float)b.t.y};
  float fc[2] = {(float)c.t.x, (float)c.t.y}, fd[2];
  __rt_mma_f32(fd, fa, fb, fc);
  d.t.x = (D)fd[0];
  d.t.y = (D)fd[1];
}
template <class D, class A, class B>
INL void simdgroup_multiply(thread MSL_MATRIX(D)& d, MSL_MATRIX(A) a, MSL_MATRIX(B) b) {
  MSL_MATRIX(D) zero = make_filled_simdgroup_matrix<D, 8>((D)0);
  simdgroup_multiply_accumulate(d, a, b, zero);
}
#define MSL_M(SPACE) \
  template <class T> INL void simdgroup_load( \
      thread MSL_MATRIX(T)& d, const SPACE T* p, ulong row_length = 8, ulong2 origin = 0, \
      bool transposed = false) { \
    const ulong r = __matrix_row(__rt_lane()), c = __matrix_col(__rt_lane()); \
    for (int i = 0; i < 2; i++) { \
      const ulong row = transposed ? c + i : r, col = transposed ? r : c + i; \
      d.t[i] = p[(row + origin.y) * row_length + col + origin.x]; \
    } \
  } \
  template <class T> INL void simdgroup_store( \
      MSL_MATRIX(T) s, SPACE T* p, ulong row_length = 8, ulong2 origin = 0, \
      bool transposed = false) { \
    const ulong r = __matrix_row(__rt_lane()), c = __matrix_col(__rt_lane()); \
    for (int i = 0; i < 2; i++) { \
      const ulong row = transposed ? c + i : r, col = transposed ? r : c + i; \
      p[(row + origin.y) * row_length + col + origin.x] = s.t[i]; \
    } \
  }
MSL_M(device) MSL_M(threadgroup)
#undef MSL_M

// atomics; loads, stores and exchanges are plain, as the emulator runs on one CPU thread
template <class T> struct atomic { T v; };
typedef atomic<int> atomic_int;  // msl_atomic_int, and so on
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
#define MSL_FETCH(SPACE, NAME) \
  template <class T> \
  INL T atomic_fetch_##NAME##_explicit(volatile SPACE atomic<T>* p, T x, memory_order) { \
    return __atomic_fetch_##NAME(&p->v, x, __ATOMIC_RELAXED); \
  }
#define MSL_M(SPACE) \
  template <class T> INL T atomic_load_explicit(const volatile SPACE atomic<T>* p, memory_order) { \
    return p->v; \
  } \
  template <class T> \
  INL void atomic_store_explicit(volatile SPACE atomic<T>* p, T x, memory_order) { p->v = x; } \
  template <class T> \
  INL T atomic_exchange_explicit(volatile SPACE atomic<T>* p, T x, memory_order) { \
    T o = p->v; \
    p->v = x; \
    return o; \
  } \
  template <class T> \
  INL bool atomic_compare_exchange_weak_explicit( \
      volatile SPACE atomic<T>* p, thread T* expected, T x, memory_order, memory_order) { \
    if (p->v == *expected) { p->v = x; return true; } \
    *expected = p->v; \
    return false; \
  } \
  MSL_FETCH(SPACE, add) MSL_FETCH(SPACE, sub) MSL_FETCH(SPACE, or) \
  MSL_FETCH(SPACE, and) MSL_FETCH(SPACE, max) MSL_FETCH(SPACE, min)
MSL_M(device) MSL_M(threadgroup)
#undef MSL_M
}  // namespace metal
#undef AIR
#undef INL
