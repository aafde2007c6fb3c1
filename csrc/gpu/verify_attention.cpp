#include "verify_attention.h"

#include <algorithm>
#include <bit>
#include <climits>

#include "cuda.h"
#include "metal.h"
#include "tiles.h"

namespace dflash {
namespace {

constexpr int kChunk = 256, kStripes = 16;  // as in the shader

struct Dims {
  int batch, heads, key_heads, inputs, capacity, key_dim, value_dim, window, most_simdgroups;
  Dims(const AttentionParts& parts, const std::vector<mx::array>& operands, mx::Stream stream)
      : batch(operands[0].shape(0)),
        heads(operands[0].shape(1)),
        key_heads(operands[1].shape(1)),
        inputs(operands[0].shape(2)),
        capacity(operands[1].shape(2)),
        key_dim(operands[0].shape(3)),
        value_dim(operands[2].shape(3)),
        window(parts.window == INT_MAX ? 0 : parts.window),
        most_simdgroups(tiles_of(stream).attention) {
  }
  int group() const {
    return heads / key_heads;
  }
  int chunks() const {
    return (capacity + kChunk - 1) / kChunk;
  }
  int columns() const {
    return group() * inputs;
  }
  /// How the columns are shared out, which changes no bits: few of them, and fp32, whose blocks are
  /// too large for threadgroup memory, go to SIMD groups that read the cache themselves; more go to
  /// SIMD groups of two tiles that share what they have staged.
  bool staged(mx::Dtype dtype) const {
    return dtype != mx::float32 && columns() > 8;
  }
  int simdgroups(bool staged) const {
    return staged ? std::min(columns() <= 32 ? 2 : 4, most_simdgroups) : 1;
  }
  int column_blocks(bool staged) const {
    const int of_block = (staged ? 16 : 8) * simdgroups(staged);
    return (columns() + of_block - 1) / of_block;
  }
  mx::Shape partial() const {
    return {batch, heads, inputs, chunks(), value_dim};
  }
  mx::Shape statistics() const {
    return {batch, heads, inputs, chunks(), 2};
  }
};

}  // namespace

mx::array cuda::verify_attention(
    const AttentionParts& parts, const std::vector<mx::array>& operands, mx::Stream stream) {
  const Dims d(parts, operands, stream);
  const auto &q = operands[0], &k = operands[1], &v = operands[2], &lengths = operands[3];
  const bool staged = d.staged(q.dtype());
  const int tiles = staged ? 2 : 1, simdgroups = d.simdgroups(staged);
  const std::string block =
      "Block block; block.length = lengths[b]; block.inputs = inputs;"
      " block.end = block.length + inputs; block.window = window; block.causal = causal;"
      " block.has_mask = has_mask; const bool in_range = in_cache(block, capacity);";
  std::vector<std::string> names = {"q", "k", "v", "lengths"};
  std::vector<mx::array> given = {q, k, v, lengths};
  if (parts.has_mask) {
    names.push_back("mask");
    given.push_back(operands[4]);
  }
  const Text chunks{
      "attend_chunk",
      {"matrix_on_cuda.h", "verify_attention.h"},
      names,
      {"partial", "statistics"},
      {{"T", q.dtype()},
       {"D", d.key_dim},
       {"Dv", d.value_dim},
       {"tiles", tiles},
       {"simdgroups", simdgroups},
       {"staged", staged},
       {"window", d.window},
       {"causal", parts.causal},
       {"has_mask", parts.has_mask},
       {"scale_bits", std::bit_cast<int>(parts.scale)}},
      [&] {
        return "constexpr int of_keys = key_stride(D), of_values = value_stride(Dv);"
               "constexpr int most = of_keys > of_values ? of_keys : of_values;"
               "__shared__ __align__(16)"
               " T weights[simdgroups * 8 * tiles * DFLASH_WEIGHTS_STRIDE];"
               "__shared__ __align__(16) T shared[staged ? 32 * most : 8];"
               "const int z = blockIdx.z, b = z / key_heads, chunks = (capacity + 255) / 256;" +
               block +
               "block.columns = group * inputs;"
               "if (!in_range) return;"
               "const size_t columns = size_t(z) * block.columns;"
               "const T *own_q = q + columns * D, *own_k = k + size_t(z) * capacity * D,"
               " *own_v = v + size_t(z) * capacity * Dv;"
               "const auto addresses = reinterpret_cast<size_t>(q) | reinterpret_cast<size_t>(k) |"
               " reinterpret_cast<size_t>(v);"
               "auto attend = [&](auto whole) { attend_chunk<T, D, Dv, tiles, simdgroups, staged,"
               " decltype(whole)::value>("
               "own_q, own_k, own_v, " +
               (parts.has_mask ? "mask" : "nullptr") +
               ", partial + columns * chunks * Dv, statistics + columns * chunks * 2, block,"
               " __int_as_float(scale_bits), chunks, int(blockIdx.y),"
               " int(blockIdx.x * simdgroups + threadIdx.y) * 8 * tiles, int(threadIdx.y),"
               " int(threadIdx.x),"
               " weights + threadIdx.y * (8 * tiles * DFLASH_WEIGHTS_STRIDE), shared); };"
               "if (addresses % 16 == 0) attend(Constant<true>());"
               " else attend(Constant<false>());";
      }};
  const auto partial = launch(
      chunks,
      given,
      {{"inputs", d.inputs},
       {"key_heads", d.key_heads},
       {"group", d.group()},
       {"capacity", d.capacity}},
      {d.partial(), d.statistics()},
      {mx::float32, mx::float32},
      {32 * d.column_blocks(staged), simdgroups * d.chunks(), d.batch * d.key_heads},
      {32, simdgroups, 1},
      stream);
  names = {"partial", "statistics", "lengths"};
  given = {partial[0], partial[1], lengths};
  if (parts.has_sinks) {
    names.push_back("sinks");
    given.push_back(operands.back());
  }
  const Text combination{
      "combine_chunks",
      {"matrix_on_cuda.h", "verify_attention.h"},
      names,
      {"out"},
      {{"T", q.dtype()},
       {"Dv", d.value_dim},
       {"window", d.window},
       {"causal", parts.causal},
       {"has_mask", parts.has_mask},
       {"has_sinks", parts.has_sinks}},
      [&] {
        return "__shared__ float shared[DFLASH_STRIPES * 33];"
               "const int column = blockIdx.x, head = column / inputs, b = head / heads;" +
               block + "combine_chunks<T, Dv>(partial, statistics, " +
               (parts.has_sinks ? "sinks" : "nullptr") +
               ", out, block, has_sinks, in_range, head % heads, chunks, column,"
               " int(blockIdx.y) * 32, int(threadIdx.y), int(threadIdx.x), shared);";
      }};
  return launch(
      combination,
      given,
      {{"inputs", d.inputs}, {"heads", d.heads}, {"chunks", d.chunks()}, {"capacity", d.capacity}},
      {{d.batch, d.heads, d.inputs, d.value_dim}},
      {q.dtype()},
      {32 * d.batch * d.heads * d.inputs, kStripes * d.value_dim / 32, 1},
      {32, kStripes, 1},
      stream)[0];
}

void VerifyAttention::run_metal(
    const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const Dims d(parts_, inputs, stream());
  const auto& q = inputs[0];
  const std::string type = shader_type(q.dtype());
  const bool staged = d.staged(q.dtype());
  const std::string dim = std::to_string(d.value_dim), key_dim = std::to_string(d.key_dim);
  const std::string tiles = staged ? "2" : "1", is_staged = staged ? "true" : "false";
  const std::string simdgroups = std::to_string(d.simdgroups(staged));
  metal::allocate(outputs);
  std::vector<mx::array> parts = {
      mx::array(d.partial(), mx::float32, nullptr, {}),
      mx::array(d.statistics(), mx::float32, nullptr, {})};
  metal::allocate(parts);
  const std::vector<bool> constants = {parts_.has_mask, parts_.causal, parts_.has_sinks};
  {
    metal::Launch launch(
        stream(),
        "verify_attention",
        "attend_chunk_" + type + "_" + key_dim + "_" + dim + "_" + tiles + "_" + simdgroups + "_" +
            is_staged,
        "attend_chunk_kernel<" + type + ", " + key_dim + ", " + dim + ", " + tiles + ", " +
            simdgroups + ", " + is_staged + ">",
        constants);
    for (int i = 0; i < 4; ++i) launch.input(inputs[i], i);
    launch.input(parts_.has_mask ? inputs[4] : q, 4);
    launch.output(parts[0], 5);
    launch.output(parts[1], 6);
    int index = 7;
    for (int x : {d.inputs, d.key_heads, d.group(), d.capacity, d.chunks(), d.window}) {
      launch.scalar(x, index++);
    }
    launch.scalar(parts_.scale, index);
    launch.threadgroups(
        {d.column_blocks(staged), d.chunks(), d.batch * d.key_heads},
        {32, d.simdgroups(staged), 1});
    launch.temporary(parts[0]);
    launch.temporary(parts[1]);
  }
  metal::Launch launch(
      stream(),
      "verify_attention",
      "combine_chunks_" + type + "_" + dim,
      "combine_chunks_kernel<" + type + ", " + dim + ">",
      constants);
  launch.input(parts[0], 0);
  launch.input(parts[1], 1);
  launch.input(inputs[3], 2);
  launch.input(parts_.has_sinks ? inputs.back() : q, 3);
  launch.output(outputs[0], 4);
  int index = 5;
  for (int x : {d.inputs, d.heads, d.capacity, d.chunks(), d.window}) {
    launch.scalar(x, index++);
  }
  launch.threadgroups({d.batch * d.heads * d.inputs, d.value_dim / 32, 1}, {32, kStripes, 1});
}

}  // namespace dflash
