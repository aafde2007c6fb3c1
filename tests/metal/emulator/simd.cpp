// What the operations of a SIMD group yield, given the operands of all of its lanes.
#include "simt.h"

#include <cmath>
#include <utility>

namespace {
const uint64_t NO_LANE = 0x7fc0dead7fc0deadull;  // from an inactive lane: a NaN

void matrix_multiply(Fiber* lane) {
  float A[8][8], B[8][8], C[8][8];
  for (int l = 0; l < 32; l++) {
    const int r = matrix_row(l), c = matrix_col(l);
    const uint64_t* a = lane[l].a;
    for (int i = 0; i < 2; i++) {
      A[r][c + i] = as_float(a[0] >> (32 * i));
      B[r][c + i] = as_float(a[1] >> (32 * i));
      C[r][c + i] = as_float(a[2] >> (32 * i));
    }
  }
  for (int l = 0; l < 32; l++) {
    const int r = matrix_row(l), c = matrix_col(l);
    float d0 = C[r][c], d1 = C[r][c + 1];
    for (int k = 0; k < 8; k++) {
      d0 = fmaf(A[r][k], B[k][c], d0);
      d1 = fmaf(A[r][k], B[k][c + 1], d1);
    }
    lane[l].result = bits(d0) | bits(d1) << 32;
  }
}

// The lanes that take part, and the ways in which values travel between them.
struct Lanes {
  Fiber* lane;
  int active[32], n = 0;  // those that wait here, in order
  uint64_t v[32];
  bool on[32] = {};
  bool shuffled;

  Lanes(Fiber* lane, int count, bool shuffled) : lane(lane), shuffled(shuffled) {
    for (int l = 0; l < 32 && l < count; l++) {
      if (lane[l].state == AT_SIMD_OP) {
        active[n++] = l;
        on[l] = true;
        v[l] = lane[l].a[0];
      }
    }
  }
  void put(int l, uint64_t x) {
    lane[l].result = x;
  }
  void put_all(uint64_t x) {
    each([&](int l) { put(l, x); });
  }
  template <typename F>
  void each(F f) {
    for (int i = 0; i < n; i++) f(active[i]);
  }
  template <typename F>
  void reduce(F f) {  // pairwise over the active lanes, as a butterfly would
    uint64_t t[32];
    for (int i = 0; i < n; i++) t[i] = v[active[i]];
    for (int i = n - 1; shuffled && i > 0; i--) std::swap(t[i], t[random_below(i + 1)]);
    for (int m = n; m > 1;) {
      const int h = (m + 1) / 2;
      for (int i = 0; i + h < m; i++) t[i] = f(t[i], t[i + h]);
      m = h;
    }
    put_all(t[0]);
  }
  template <typename F>
  void fold(uint64_t x, F f) {
    each([&](int l) { x = f(x, v[l]); });
    put_all(x);
  }
  template <typename F>
  void scan(F f, uint64_t identity, bool inclusive) {
    uint64_t total = identity;
    for (int i = 0; i < n; i++) {
      const uint64_t next = i ? f(total, v[active[i]]) : v[active[i]];
      put(active[i], inclusive ? next : total);
      total = next;
    }
  }
  void from(int l, int source) {  // lane l takes the value of lane `source`
    const bool inside = source >= 0 && source < 32;
    put(l, inside && on[source] ? v[source] : NO_LANE);
    if (!inside) fail("shuffle from a lane outside the SIMD group", &lane[l]);
  }
  void edge(int l, int source) {  // past the edge, Metal says that a lane keeps its own value
    put(l, source < 0 || source > 31 ? v[l] : on[source] ? v[source] : NO_LANE);
  }
  void fill(int l, int direction) {
    const int width = lane[l].arg2 ? lane[l].arg2 : 32;
    const int first = l / width * width, source = l + direction * lane[l].arg;
    if (direction < 0) {
      put(l, source >= first ? v[source] : lane[source + width].a[1]);
    } else {
      put(l, source < first + width ? v[source] : lane[source - width].a[1]);
    }
  }
  void quad_sum() {
    for (int q = 0; q < 32; q += 4) {
      float x = 0;
      for (int l = q; l < q + 4; l++) x += on[l] ? as_float(v[l]) : 0.0f;
      for (int l = q; l < q + 4; l++) {
        if (on[l]) put(l, bits(x));
      }
    }
  }
};
}  // namespace

void resolve(Fiber* lane, int count, bool shuffled) {
  Lanes s(lane, count, shuffled);
  const Fiber& first = lane[s.active[0]];
  for (int i = 1; i < s.n; i++) {
    const Fiber& other = lane[s.active[i]];
    if (other.op != first.op || other.site != first.site) {
      fail(
          "divergent SIMD-group operation: lanes of one SIMD group wait at different ones", &other);
      break;
    }
  }
  auto add_f = [](uint64_t a, uint64_t b) { return bits(as_float(a) + as_float(b)); };
  auto mul_f = [](uint64_t a, uint64_t b) { return bits(as_float(a) * as_float(b)); };
  auto min_f = [](uint64_t a, uint64_t b) { return bits(fminf(as_float(a), as_float(b))); };
  auto max_f = [](uint64_t a, uint64_t b) { return bits(fmaxf(as_float(a), as_float(b))); };
  auto add_i = [](uint64_t a, uint64_t b) { return a + b; };
  auto mul_i = [](uint64_t a, uint64_t b) { return a * b; };
  auto min_i = [](uint64_t a, uint64_t b) { return (int64_t)a < (int64_t)b ? a : b; };
  auto max_i = [](uint64_t a, uint64_t b) { return (int64_t)a > (int64_t)b ? a : b; };
  auto and_ = [](uint64_t a, uint64_t b) { return a & b; };
  auto or_ = [](uint64_t a, uint64_t b) { return a | b; };
  auto xor_ = [](uint64_t a, uint64_t b) { return a ^ b; };
  auto arg = [&](int l) { return lane[l].arg; };
  // clang-format off
  switch (first.op) {
    case SUM_F: s.reduce(add_f); break;
    case PRODUCT_F: s.reduce(mul_f); break;
    case MIN_F: s.reduce(min_f); break;
    case MAX_F: s.reduce(max_f); break;
    case INCLUSIVE_SUM_F: s.scan(add_f, bits(0.0f), true); break;
    case EXCLUSIVE_SUM_F: s.scan(add_f, bits(0.0f), false); break;
    case INCLUSIVE_PRODUCT_F: s.scan(mul_f, bits(1.0f), true); break;
    case EXCLUSIVE_PRODUCT_F: s.scan(mul_f, bits(1.0f), false); break;
    case SUM_I: s.reduce(add_i); break;
    case PRODUCT_I: s.reduce(mul_i); break;
    case MIN_I: s.reduce(min_i); break;
    case MAX_I: s.reduce(max_i); break;
    case INCLUSIVE_SUM_I: s.scan(add_i, 0, true); break;
    case EXCLUSIVE_SUM_I: s.scan(add_i, 0, false); break;
    case INCLUSIVE_PRODUCT_I: s.scan(mul_i, 1, true); break;
    case EXCLUSIVE_PRODUCT_I: s.scan(mul_i, 1, false); break;
    case AND: s.reduce(and_); break;
    case OR: s.reduce(or_); break;
    case XOR: s.reduce(xor_); break;
    case SHUFFLE:
    case BROADCAST: s.each([&](int l) { s.from(l, arg(l)); }); break;
    case SHUFFLE_XOR: s.each([&](int l) { s.from(l, l ^ arg(l)); }); break;
    case SHUFFLE_UP: s.each([&](int l) { s.edge(l, l - arg(l)); }); break;
    case SHUFFLE_DOWN: s.each([&](int l) { s.edge(l, l + arg(l)); }); break;
    case ROTATE_UP: s.each([&](int l) { s.from(l, (l - arg(l)) & 31); }); break;
    case ROTATE_DOWN: s.each([&](int l) { s.from(l, (l + arg(l)) & 31); }); break;
    case FILL_UP: s.each([&](int l) { s.fill(l, -1); }); break;
    case FILL_DOWN: s.each([&](int l) { s.fill(l, 1); }); break;
    case BROADCAST_FIRST: s.put_all(s.v[s.active[0]]); break;
    case ALL: s.fold(1, and_); break;
    case ANY: s.fold(0, or_); break;
    case BALLOT: {
      uint64_t x = 0;
      s.each([&](int l) { x |= (s.v[l] & 1) << l; });
      s.put_all(x);
      break;
    }
    case IS_FIRST: s.each([&](int l) { s.put(l, l == s.active[0]); }); break;
    case SIMD_BARRIER: break;
    case QUAD_SUM_F: s.quad_sum(); break;
    case MATRIX_MULTIPLY:
      if (s.n == 32) matrix_multiply(lane);
      else fail("simdgroup_matrix operation with inactive lanes", &first);
      break;
  }
  // clang-format on
}
