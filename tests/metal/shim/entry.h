#pragma once
// clang-format off

// How the emulator calls a kernel; emulator/simt.h knows the same layout.
struct __msl_ctx {
  ulong buf[31], tg[31];
  uint tpg[3], tgp[3], tpt[3], tptg[3], tgpg[3], tpgrid[3];
  uint tit, sg, lane, nsg, sgsize, dsg, qlane, quad;
};
struct __msl_P {  // an address, as whatever pointer or reference the kernel's parameter is
  ulong v;
  template <class T> operator device T*() const thread { return (device T*)v; }
  template <class T> operator constant T*() const thread { return (constant T*)v; }
  template <class T> operator threadgroup T*() const thread { return (threadgroup T*)v; }
  template <class T> operator constant T&() const thread { return *(constant T*)v; }
  template <class T> operator device T&() const thread { return *(device T*)v; }
  template <class T> operator threadgroup T&() const thread { return *(threadgroup T*)v; }
};
struct __msl_I {  // a position or count, as whatever integer or vector the kernel's parameter is
  uint a, b, c;
  operator uint() const thread { return a; }
  operator ushort() const thread { return (ushort)a; }
  operator metal::vec<uint, 2>() const thread { return metal::__make_vector<uint, 2>(a, b); }
  operator metal::vec<ushort, 2>() const thread { return metal::__make_vector<ushort, 2>(a, b); }
  operator metal::vec<uint, 3>() const thread { return metal::__make_vector<uint, 3>(a, b, c); }
  operator metal::vec<ushort, 3>() const thread { return metal::__make_vector<ushort, 3>(a, b, c); }
};

// vector constructors: a type name that is not followed by '(' is left alone
#define char2(...) __mk_char2(__VA_ARGS__)
#define char3(...) __mk_char3(__VA_ARGS__)
#define char4(...) __mk_char4(__VA_ARGS__)
#define uchar2(...) __mk_uchar2(__VA_ARGS__)
#define uchar3(...) __mk_uchar3(__VA_ARGS__)
#define uchar4(...) __mk_uchar4(__VA_ARGS__)
#define short2(...) __mk_short2(__VA_ARGS__)
#define short3(...) __mk_short3(__VA_ARGS__)
#define short4(...) __mk_short4(__VA_ARGS__)
#define ushort2(...) __mk_ushort2(__VA_ARGS__)
#define ushort3(...) __mk_ushort3(__VA_ARGS__)
#define ushort4(...) __mk_ushort4(__VA_ARGS__)
#define int2(...) __mk_int2(__VA_ARGS__)
#define int3(...) __mk_int3(__VA_ARGS__)
#define int4(...) __mk_int4(__VA_ARGS__)
#define uint2(...) __mk_uint2(__VA_ARGS__)
#define uint3(...) __mk_uint3(__VA_ARGS__)
#define uint4(...) __mk_uint4(__VA_ARGS__)
#define long2(...) __mk_long2(__VA_ARGS__)
#define long3(...) __mk_long3(__VA_ARGS__)
#define long4(...) __mk_long4(__VA_ARGS__)
#define ulong2(...) __mk_ulong2(__VA_ARGS__)
#define ulong3(...) __mk_ulong3(__VA_ARGS__)
#define ulong4(...) __mk_ulong4(__VA_ARGS__)
#define half2(...) __mk_half2(__VA_ARGS__)
#define half3(...) __mk_half3(__VA_ARGS__)
#define half4(...) __mk_half4(__VA_ARGS__)
#define float2(...) __mk_float2(__VA_ARGS__)
#define float3(...) __mk_float3(__VA_ARGS__)
#define float4(...) __mk_float4(__VA_ARGS__)
