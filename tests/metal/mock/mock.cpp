// Members of MLX's metal::Device and metal::CommandEncoder (the real classes of device.h) on the
// emulator: get_library compiles the shader with the bench, dispatch_* runs it at once on the
// arrays' memory. DFLASH_METAL_SCHEDULE is 0, 1 or 2; with DFLASH_METAL_TRACE the kernels that run
// are named on stderr.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>

#include "mlx/backend/metal/device.h"

namespace {
MTL::ComputeCommandEncoder encoder_state;

[[noreturn]] void fail(const std::string& why) {
  throw std::runtime_error("[mock Metal] " + why);
}

std::string read_file(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

std::string between(
    const std::string& text, const std::string& before, char after, size_t from = 0) {
  auto at = text.find(before, from);
  if (at == std::string::npos) return "";
  at += before.size();
  return text.substr(at, text.find(after, at) - at);
}

int schedule() {
  const char* value = getenv("DFLASH_METAL_SCHEDULE");
  return value ? std::stoi(value) : 0;
}

void run(MTL::Size grid, MTL::Size threads, int grid_is_threadgroups) {
  auto& e = encoder_state;
  if (!e.kernel) fail("dispatch without a kernel");
  if (threads.width * threads.height * threads.depth > 1024) {
    fail(e.kernel->name + ": threadgroup larger than 1024 threads");
  }
  if (getenv("DFLASH_METAL_TRACE")) std::cerr << e.kernel->name << std::endl;
  uint64_t buffers[31];
  for (int i : e.kernel->indices) {
    if (!e.buffers[i]) fail(e.kernel->name + ": buffer " + std::to_string(i) + " is not set");
  }
  for (int i = 0; i < 31; i++) buffers[i] = (uint64_t)e.buffers[i];
  const uint32_t g[3] = {(uint32_t)grid.width, (uint32_t)grid.height, (uint32_t)grid.depth};
  const uint32_t t[3] = {
      (uint32_t)threads.width, (uint32_t)threads.height, (uint32_t)threads.depth};
  for (auto& [address, bytes] : e.kernel->constants) memcpy(address, bytes.data(), bytes.size());
  using Run =
      int (*)(void*, const uint64_t*, const uint32_t*, const uint32_t*, const uint32_t*, int, int);
  auto msl_run = (Run)dlsym(e.kernel->library->handle, "msl_run");
  auto msl_error = (const char* (*)())dlsym(e.kernel->library->handle, "msl_error");
  void* entry = e.kernel->entry;
  if (msl_run(entry, buffers, e.threadgroup_memory, g, t, grid_is_threadgroups, schedule())) {
    fail(e.kernel->name + ": " + msl_error());
  }
}

// The path of the .so that the bench makes of a shader.
std::string compile(const std::string& name, const std::string& source) {
  for (char c : source) {
    if (c & 0x80) fail("the shader " + name + " is not ASCII");
  }
  std::string folder = std::filesystem::temp_directory_path() / "mock-metal-XXXXXX";
  if (!mkdtemp(folder.data())) fail("no temporary folder");
  const std::string shader = folder + "/" + name + ".metal", log = folder + "/log";
  std::ofstream(shader) << source;
  const std::string command = "cd '" BENCH_ROOT "' && '" BENCH_PYTHON "' -m tests.metal compile '" +
                              shader + "' >'" + log + "' 2>&1";
  const int failed = system(command.c_str());
  const std::string output = read_file(log);
  std::filesystem::remove_all(folder);
  if (failed) fail("the shader " + name + " does not compile:\n" + output);
  return between(output, "", '\n');
}
}  // namespace

namespace mlx::core::metal {
ResidencySets::ResidencySets(MTL::Device* d) : device_(d) {
}
ResidencySets::~ResidencySets() {
}
Device::Device() : residency_sets_(nullptr) {
}
Device::~Device() {
}
CommandEncoder::CommandEncoder(Device& d, int, ResidencySets& r) : device_(d), residency_sets_(r) {
}
CommandEncoder::~CommandEncoder() {
}

Device& device(mlx::core::Device) {
  static Device d;
  return d;
}

CommandEncoder& get_command_encoder(Stream s) {
  static ResidencySets r(nullptr);
  static CommandEncoder e(device(s.device), 0, r);
  return e;
}

MTL::ComputeCommandEncoder* CommandEncoder::get_command_encoder() {
  return &encoder_state;
}

void CommandEncoder::set_input_array(const array& a, int i, int64_t offset) {
  if (!a.data<char>()) fail("array without data");
  encoder_state.buffers[i] = (char*)a.data<char>() + offset;
}

void CommandEncoder::set_output_array(array& a, int i, int64_t offset) {
  set_input_array(a, i, offset);
}

void CommandEncoder::add_temporary(array) {
}
void CommandEncoder::add_temporaries(std::vector<array>) {
}
void CommandEncoder::barrier() {
}

void CommandEncoder::dispatch_threadgroups(MTL::Size grid, MTL::Size threads) {
  run(grid, threads, 1);
}

void CommandEncoder::dispatch_threads(MTL::Size grid, MTL::Size threads) {
  run(grid, threads, 0);
}

MTL::Library* Device::get_library(const std::string& name, const std::string& path) {
  fail("library " + name + ": a prebuilt one (" + path + ") does not run here");
}

MTL::Library* Device::get_library(
    const std::string& name,
    const CompileOptions&,
    const std::function<std::string(void)>& builder) {
  static std::map<std::string, MTL::Library*> libraries;
  auto& library = libraries[name];
  if (library) return library;
  const std::string so = compile(name, builder());
  auto fresh = std::make_unique<MTL::Library>();
  fresh->handle = dlopen(so.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!fresh->handle) fail(dlerror());
  fresh->description = read_file(so + ".json");
  return library = fresh.release();
}

MTL::ComputePipelineState* Device::get_kernel(
    const std::string& name,
    MTL::Library* library,
    const std::string& hash_name,
    const MTLFCList& constants,
    const std::vector<MTL::Function*>&) {
  static std::map<std::pair<MTL::Library*, std::string>, MTL::ComputePipelineState*> kernels;
  // MLX finds a pipeline by this name alone, so one that leaves out a constant gets the wrong one
  auto& kernel = kernels[{library, hash_name.empty() ? name : hash_name}];
  if (kernel) return kernel;
  const auto& text = library->description;
  const auto at = text.find("\"name\": \"" + name + "\"");
  if (at == std::string::npos) fail("no kernel " + name);
  auto fresh = std::make_unique<MTL::ComputePipelineState>();
  fresh->library = library;
  fresh->name = name;
  fresh->entry = dlsym(library->handle, between(text, "\"entry\": \"", '"', at).c_str());
  const auto arguments = text.substr(at, text.find('}', at) - at);
  const std::string buffer = "[\"buf\", ";
  for (size_t next = 0; (next = arguments.find(buffer, next)) != std::string::npos; next++) {
    fresh->indices.push_back(std::stoi(arguments.substr(next + buffer.size())));
  }
  for (auto& [value, type, index] : constants) {
    const std::string getter = "__fc_" + std::to_string(index);
    auto address = (uint64_t (*)())dlsym(library->handle, getter.c_str());
    if (!address) fail(name + ": no function constant " + std::to_string(index));
    const int size = type == MTL::DataType::DataTypeBool ? 1
                     : type == MTL::DataType::DataTypeShort || type == MTL::DataType::DataTypeUShort
                         ? 2
                         : 4;
    fresh->constants.emplace_back((void*)address(), std::string((const char*)value, size));
  }
  return kernel = fresh.release();
}
}  // namespace mlx::core::metal
