// The language: address spaces, types, traits, limits, vectors.
#pragma once
// clang-format off

// names of the language
#define device __global
#define threadgroup __local
#define thread __private
// `constant` is a keyword of OpenCL already
#define bfloat __bf16
#define nullptr_t __nullptr_t_unused
// OpenCL has types of these names already
#define atomic_int msl_atomic_int
#define atomic_uint msl_atomic_uint
#define atomic_float msl_atomic_float
#define INL inline __attribute__((always_inline))
#define AIR(name) __asm__("air." name)
#define CONVERGENT __attribute__((convergent))
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;

#define MSL_EACH_INT(M) M(char) M(uchar) M(short) M(ushort) M(int) M(uint) M(long) M(ulong)
#define MSL_EACH_REAL(M) M(float) M(half)
#define MSL_EACH_SCALAR(M) MSL_EACH_INT(M) MSL_EACH_REAL(M)
#define MSL_EACH_SPACE(M) M(device) M(threadgroup) M(thread) M(constant)

namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

// type traits
template <class T, T v> struct integral_constant {
  static constexpr constant T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const thread noexcept { return v; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <class T> struct remove_addrspace { using type = T; };
#define MSL_M(SPACE) \
  template <class T> struct remove_addrspace<SPACE T> { using type = T; }; \
  template <class T> struct remove_addrspace<const SPACE T> { using type = const T; };
MSL_EACH_SPACE(MSL_M)
#undef MSL_M
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;

template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> struct remove_volatile { using type = T; };
template <class T> struct remove_volatile<volatile T> { using type = T; };
template <class T>
using remove_cv_t = typename remove_volatile<typename remove_const<T>::type>::type;
template <class T> struct remove_reference { using type = T; };
#define MSL_M(SPACE) template <class T> struct remove_reference<SPACE T&> { using type = SPACE T; };
MSL_EACH_SPACE(MSL_M)
#undef MSL_M
template <class T> using remove_reference_t = typename remove_reference<T>::type;

template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional { using type = F; };
template <class T, class F> struct conditional<true, T, F> { using type = T; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class... B> struct _disjunction : false_type {};
template <class B> struct _disjunction<B> : B {};
template <class B, class... R>
struct _disjunction<B, R...> : conditional_t<bool(B::value), B, _disjunction<R...>> {};
template <class... B> struct _conjunction : true_type {};
template <class B> struct _conjunction<B> : B {};
template <class B, class... R>
struct _conjunction<B, R...> : conditional_t<bool(B::value), _conjunction<R...>, B> {};

template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> static constexpr constant bool is_same_v = is_same<A, B>::value;
template <class A, class B> static constexpr constant bool is_convertible_v =
    __is_convertible(A, B) && !(__is_same(B, bfloat) && !__is_same(A, bfloat));
template <class A, class B> struct is_convertible : bool_constant<is_convertible_v<A, B>> {};
template <class T> struct is_const : false_type {};
template <class T> struct is_const<const T> : true_type {};
#define MSL_TRAIT(NAME, VALUE) \
  template <class T> struct NAME : bool_constant<VALUE> {}; \
  template <class T> static constexpr constant bool NAME##_v = NAME<T>::value;
MSL_TRAIT(is_integral, __is_integral(remove_cv_t<T>))
MSL_TRAIT(is_floating_point, __is_floating_point(remove_cv_t<T>))
MSL_TRAIT(is_signed, __is_signed(T))
MSL_TRAIT(is_unsigned, __is_unsigned(T))
MSL_TRAIT(is_arithmetic, __is_arithmetic(T))
template <class T> struct make_unsigned { using type = __make_unsigned(T); };
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;
template <class T> T declval();

// numeric_limits
template <class T> struct numeric_limits;
#define MSL_LIMITS_INT(T, MIN, MAX, DIGITS) \
  template <> struct numeric_limits<T> { \
    static constexpr T min() { return MIN; } \
    static constexpr T max() { return MAX; } \
    static constexpr T lowest() { return MIN; } \
    static constexpr constant int digits = DIGITS; \
    static constexpr constant bool is_signed = ((T)-1 < (T)0); \
    static constexpr constant bool has_infinity = false; \
  };
MSL_LIMITS_INT(char, -128, 127, 7)
MSL_LIMITS_INT(uchar, 0, 255, 8)
MSL_LIMITS_INT(short, -32768, 32767, 15)
MSL_LIMITS_INT(ushort, 0, 65535, 16)
MSL_LIMITS_INT(int, -2147483647 - 1, 2147483647, 31)
MSL_LIMITS_INT(uint, 0, 4294967295u, 32)
MSL_LIMITS_INT(long, -0x7fffffffffffffffl - 1, 0x7fffffffffffffffl, 63)
MSL_LIMITS_INT(ulong, 0, 0xfffffffffffffffful, 64)
template <> struct numeric_limits<bool> {
  static constexpr bool min() { return false; }
  static constexpr bool max() { return true; }
};
#define MSL_LIMITS_REAL(T, MIN, MAX, EPSILON, DIGITS) \
  template <> struct numeric_limits<T> { \
    static constexpr T min() { return (T)MIN; } \
    static constexpr T max() { return (T)MAX; } \
    static constexpr T lowest() { return (T)(-MAX); } \
    static constexpr T epsilon() { return (T)EPSILON; } \
    static constexpr T infinity() { return (T)__builtin_inff(); } \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
    static constexpr constant int digits = DIGITS; \
    static constexpr constant bool has_infinity = true; \
  };
MSL_LIMITS_REAL(float, 0x1p-126f, 0x1.fffffep+127f, 0x1p-23f, 24)
MSL_LIMITS_REAL(half, 0x1p-14f, 65504.0f, 0x1p-10f, 11)
MSL_LIMITS_REAL(bfloat, 0x1p-126f, 0x1.fep+127f, 0x1p-7f, 8)
}  // namespace metal

template <class U, class T> inline constexpr U as_type(T x) {
  static_assert(sizeof(U) == sizeof(T), "as_type: sizes differ");
  return __builtin_bit_cast(U, x);
}

// vector types
#define MSL_M(T) \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_EACH_SCALAR(MSL_M)
#undef MSL_M
typedef bfloat bfloat2 __attribute__((ext_vector_type(2)));
typedef bfloat bfloat3 __attribute__((ext_vector_type(3)));
typedef bfloat bfloat4 __attribute__((ext_vector_type(4)));
typedef char bool2 __attribute__((ext_vector_type(2)));
typedef char bool4 __attribute__((ext_vector_type(4)));

// `float4(a, b)` is a macro (end of entry.h) for __mk_float4(a, b), which counts the components
namespace metal {
template <class T> struct __lanes { static constexpr constant int n = 1; };
template <class T, int N> struct __lanes<vec<T, N>> { static constexpr constant int n = N; };
template <class T, int N, class S> inline void __append(thread vec<T, N>& v, thread int& at, S s) {
  if constexpr (__lanes<S>::n == 1) v[at++] = (T)s;
  else for (int k = 0; k < __lanes<S>::n; k++) v[at++] = (T)s[k];
}
template <class T, int N, class... A> inline vec<T, N> __make_vector(A... a) {
  constexpr int total = (0 + ... + __lanes<A>::n);
  constexpr bool splat = sizeof...(A) == 1 && total == 1;
  static_assert(total == N || splat, "vector constructor: wrong number of components");
  vec<T, N> v;
  int at = 0;
  (__append<T, N>(v, at, a), ...);
  if constexpr (splat) for (int k = 1; k < N; k++) v[k] = v[0];
  return v;
}
}  // namespace metal
#define MSL_N(T, N) \
  template <class... A> inline ::metal::vec<T, N> __mk_##T##N(A... a) { \
    return ::metal::__make_vector<T, N>(a...); \
  } \
  namespace metal { using ::__mk_##T##N; using ::T##N; }
#define MSL_M(T) MSL_N(T, 2) MSL_N(T, 3) MSL_N(T, 4)
MSL_EACH_SCALAR(MSL_M)
#undef MSL_M
#undef MSL_N

namespace metal {
using ::uchar; using ::ushort; using ::uint; using ::ulong; using ::size_t;
using ::int8_t; using ::uint8_t; using ::int16_t; using ::uint16_t;
using ::int32_t; using ::uint32_t; using ::int64_t; using ::uint64_t;
}
