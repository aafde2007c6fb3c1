// Stand-in for metal-cpp on Linux: the names that mlx/backend/metal/device.h mentions, and an
// encoder that records what it is given.
#pragma once
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace NS {
using UInteger = unsigned long;
enum { UTF8StringEncoding = 4, ASCIIStringEncoding = 1 };
class String {
 public:
  static String* string(const char*, int) {
    return nullptr;
  }
};
class AutoreleasePool {};
class Error {};
template <class T>
class SharedPtr {
  T* p = nullptr;

 public:
  SharedPtr() = default;
  explicit SharedPtr(T* x) : p(x) {
  }
  T* get() const {
    return p;
  }
  T* operator->() const {
    return p;
  }
  explicit operator bool() const {
    return p;
  }
};
}  // namespace NS

namespace MTL {
enum class DataType : unsigned long {  // the values are Metal's
  DataTypeFloat = 3,
  DataTypeInt = 29,
  DataTypeUInt = 33,
  DataTypeShort = 37,
  DataTypeUShort = 41,
  DataTypeBool = 53
};
constexpr auto DataTypeBool = DataType::DataTypeBool;
constexpr auto DataTypeInt = DataType::DataTypeInt;
constexpr auto DataTypeUInt = DataType::DataTypeUInt;
constexpr auto DataTypeFloat = DataType::DataTypeFloat;
struct Size {
  unsigned long width, height, depth;
  Size() = default;
  Size(unsigned long w, unsigned long h, unsigned long d) : width(w), height(h), depth(d) {
  }
};
class Resource {};
class Allocation {};
class Buffer : public Resource {};
class CommandQueue {};
class CommandBuffer {};
class Fence {};
class Device {};
class Function {};
class LinkedFunctions {};
class ResidencySet {};
class SharedEvent {};

/// A shader, compiled for the emulator.
class Library {
 public:
  void* handle = nullptr;
  std::string description;
};

class ComputePipelineState {
 public:
  Library* library;
  std::string name;
  void* entry;
  std::vector<int> indices;                              // of the buffers that it takes
  std::vector<std::pair<void*, std::string>> constants;  // address and bytes of each
  unsigned long maxTotalThreadsPerThreadgroup() const {
    return 1024;
  }
  unsigned long threadExecutionWidth() const {
    return 32;
  }
};

class ComputeCommandEncoder {
 public:
  ComputePipelineState* kernel = nullptr;
  void* buffers[31] = {};
  uint32_t threadgroup_memory[31] = {};
  std::map<int, std::vector<char>> bytes;

  void setComputePipelineState(ComputePipelineState* p) {
    kernel = p;
    memset(buffers, 0, sizeof buffers);
    memset(threadgroup_memory, 0, sizeof threadgroup_memory);
    bytes.clear();
  }
  void setBytes(const void* v, unsigned long n, unsigned long i) {
    bytes[i].assign((const char*)v, (const char*)v + n);
    buffers[i] = bytes[i].data();
  }
  void setThreadgroupMemoryLength(unsigned long n, unsigned long i) {
    threadgroup_memory[i] = n;
  }
};
}  // namespace MTL
