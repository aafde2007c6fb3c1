#include "verify_attention.h"

#include <algorithm>
#include <climits>
#include <memory>

#include "cpu/launch.h"
#include "gpu/cuda.h"
#include "gpu/verify_attention.h"

namespace dflash {
namespace {

constexpr const char* kOp = "verify_attention";

void expect_head_dims(int key_dim, int value_dim) {
  const bool one = key_dim == value_dim && (key_dim == 32 || key_dim == 64 || key_dim == 96 ||
                                            key_dim == 128 || key_dim == 256);
  if (!one && !(key_dim == 192 && value_dim == 128)) {
    refuse(
        kOp,
        "expected head dims D = Dv of 32, 64, 96, 128 or 256, or D = 192 with Dv = 128, but got D"
        " = ",
        key_dim,
        ", Dv = ",
        value_dim);
  }
}

/// Passes over the queries, each of two steps: chunks to partial sums, partial sums to rows.
void run_passes(cpu::VerifyAttention args) {
  const int group = args.heads / args.key_heads, all = args.inputs * group;
  const int passes = (all + cpu::kAttentionQueries - 1) / cpu::kAttentionQueries;
  std::vector<int> first(args.batch), end(args.batch);
  args.first_chunk = first.data();
  args.end_chunk = end.data();
  for (int pass = 0; pass < passes; ++pass) {
    args.first = int(size_t(all) * pass / passes);
    args.queries = int(size_t(all) * (pass + 1) / passes) - args.first;
    const int from = args.first / group, last = (args.first + args.queries - 1) / group;
    size_t keys = 0;
    args.chunks = 0;
    for (int b = 0; b < args.batch; ++b) {
      const int length = args.lengths[b];
      const int begin = std::max(0, length + from + 1 - args.window);
      const int stop = length + (args.causal && !args.mask ? last + 1 : args.inputs);
      first[b] = begin / cpu::kAttentionChunk;
      end[b] = (stop + cpu::kAttentionChunk - 1) / cpu::kAttentionChunk;
      args.chunks = std::max(args.chunks, end[b] - first[b]);
      keys += stop - begin;
    }
    const size_t rows = size_t(args.batch) * args.key_heads * args.queries;
    const auto sums = std::make_unique_for_overwrite<float[]>(rows * args.chunks * args.value_dim);
    const auto stats = std::make_unique_for_overwrite<float[]>(rows * args.chunks * 2);
    args.sums = sums.get();
    args.stats = stats.get();
    const auto& kernels = cpu::kernels();
    const size_t products = keys * args.key_heads * args.queries * (args.key_dim + args.value_dim);
    cpu::share(products, [&](int part, int parts) { kernels.verify_attention(args, part, parts); });
    cpu::share(rows * args.chunks * args.value_dim, [&](int part, int parts) {
      kernels.combine_attention(args, part, parts);
    });
  }
}

}  // namespace

mx::array verify_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& lengths,
    float scale,
    std::optional<int> window,
    bool causal,
    const std::optional<mx::array>& mask,
    const std::optional<mx::array>& sinks,
    mx::StreamOrDevice where) {
  const auto stream = mx::to_stream(where);
  expect_shape(kOp, "q", q, {-1, -1, -1, -1});
  expect_not_empty(kOp, "q", q);
  expect_floating(kOp, "q", q);
  const int batch = q.shape(0), heads = q.shape(1), inputs = q.shape(2);
  expect_shape(kOp, "k", k, {batch, -1, -1, q.shape(3)});
  expect_not_empty(kOp, "k", k);
  expect_dtype(kOp, "k", k, q.dtype());
  expect_shape(kOp, "v", v, {batch, k.shape(1), k.shape(2), -1});
  expect_not_empty(kOp, "v", v);
  expect_dtype(kOp, "v", v, q.dtype());
  expect_head_dims(q.shape(3), v.shape(3));
  if (heads % k.shape(1) != 0) {
    refuse(kOp, "expected Hq to be a multiple of Hkv but got Hq = ", heads, ", Hkv = ", k.shape(1));
  }
  if (inputs > k.shape(2)) {
    refuse(kOp, "expected at most ", k.shape(2), " rows (the capacity) but got ", inputs);
  }
  if (window && *window < 1) {
    refuse(kOp, "expected a window of at least 1 but got ", *window);
  }
  std::vector<mx::array> operands;
  for (const auto& x : {q, k, v}) {
    operands.push_back(row_contiguous(x, stream));
  }
  operands.push_back(per_row(kOp, "lengths", lengths, batch, stream));
  if (mask) {
    expect_shape(kOp, "mask", *mask, {inputs, inputs});
    expect_dtype(kOp, "mask", *mask, mx::bool_);
    operands.push_back(row_contiguous(*mask, stream));
  }
  if (sinks) {
    expect_shape(kOp, "sinks", *sinks, {heads});
    expect_dtype(kOp, "sinks", *sinks, mx::float32);
    operands.push_back(row_contiguous(*sinks, stream));
  }
  const AttentionParts parts{
      .scale = scale,
      .window = window.value_or(INT_MAX),
      .causal = causal,
      .has_mask = mask.has_value(),
      .has_sinks = sinks.has_value()};
  if (cuda::runs_on(stream)) {
    return cuda::verify_attention(parts, operands, stream);
  }
  return mx::array(
      {batch, heads, inputs, v.shape(3)},
      q.dtype(),
      std::make_shared<VerifyAttention>(stream, parts),
      std::move(operands));
}

void VerifyAttention::run_cpu(
    const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  cpu::allocate(outputs);
  const auto &q = inputs[0], &k = inputs[1], &v = inputs[2];
  cpu::VerifyAttention args{
      .q = q.data<void>(),
      .k = k.data<void>(),
      .v = v.data<void>(),
      .lengths = inputs[3].data<int>(),
      .mask = parts_.has_mask ? inputs[4].data<bool>() : nullptr,
      .sinks = parts_.has_sinks ? inputs.back().data<float>() : nullptr,
      .out = outputs[0].data<void>(),
      .batch = q.shape(0),
      .heads = q.shape(1),
      .key_heads = k.shape(1),
      .inputs = q.shape(2),
      .capacity = k.shape(2),
      .key_dim = q.shape(3),
      .value_dim = v.shape(3),
      .window = parts_.window,
      .causal = parts_.causal,
      .scale = parts_.scale,
      .type = cpu_type(q.dtype())};
  cpu::dispatch(stream(), outputs, [args] {
    cpu::expect_range(kOp, "lengths", args.lengths, args.batch, args.capacity - args.inputs);
    run_passes(args);
  });
}

}  // namespace dflash
