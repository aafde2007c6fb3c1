#include "kv_write.h"

#include <cstring>
#include <limits>

#include "cpu/launch.h"
#include "gpu/cuda.h"
#include "gpu/metal.h"

namespace dflash {
namespace {

/// MLX's CUDA kernels cannot write into an input, so here MLX's own slice update does, row by row.
mx::array write_slices(
    mx::array cache, const mx::array& rows, const std::vector<int>& starts, mx::Stream stream) {
  auto from = mx::Shape(4, 0), to = rows.shape();
  for (int b = 0; b < cache.shape(0); ++b) {
    const auto row =
        mx::slice(rows, {b, 0, 0, 0}, {b + 1, rows.shape(1), rows.shape(2), rows.shape(3)}, stream);
    from[0] = b, to[0] = b + 1;
    from[2] = starts[b], to[2] = starts[b] + rows.shape(2);
    cache = mx::slice_update(cache, row, from, to, stream);
  }
  return cache;
}

/// The same at starts that only the device knows.
mx::array write_slices(
    mx::array cache, const mx::array& rows, const mx::array& lengths, mx::Stream stream) {
  const int last = cache.shape(2) - rows.shape(2);
  const auto zero = mx::array(0), limit = mx::array(last);
  const auto starts = mx::clip(lengths, zero, limit, stream);
  const auto in_range = mx::reshape(mx::equal(starts, lengths, stream), {-1, 1, 1, 1}, stream);
  const auto nan = mx::array(std::numeric_limits<float>::quiet_NaN(), rows.dtype());
  const auto values = mx::where(in_range, rows, nan, stream);
  for (int b = 0; b < cache.shape(0); ++b) {
    const auto start =
        mx::concatenate({mx::array({b}), mx::slice(starts, {b}, {b + 1}, stream)}, 0, stream);
    const auto row = mx::slice(
        values, {b, 0, 0, 0}, {b + 1, rows.shape(1), rows.shape(2), rows.shape(3)}, stream);
    cache = mx::slice_update(cache, row, start, {0, 2}, stream);
  }
  return cache;
}

}  // namespace

mx::array kv_write(
    const mx::array& cache,
    const mx::array& rows,
    const mx::array& lengths,
    const std::optional<std::vector<int>>& starts,
    const std::optional<mx::array>& after,
    mx::StreamOrDevice where) {
  const char* op = "kv_write";
  const auto stream = mx::to_stream(where);
  expect_shape(op, "cache", cache, {-1, -1, -1, -1});
  expect_not_empty(op, "cache", cache);
  expect_floating(op, "cache", cache);
  expect_shape(op, "new", rows, {cache.shape(0), cache.shape(1), -1, cache.shape(3)});
  expect_not_empty(op, "new", rows);
  expect_dtype(op, "new", rows, cache.dtype());
  if (rows.shape(2) > cache.shape(2)) {
    refuse(
        op,
        "expected at most ",
        cache.shape(2),
        " new rows (the capacity) but got ",
        rows.shape(2));
  }
  const auto at = per_row(op, "lengths", lengths, cache.shape(0), stream);
  if (cuda::runs_on(stream)) {
    return starts ? write_slices(cache, rows, *starts, stream)
                  : write_slices(cache, rows, at, stream);
  }
  std::vector<mx::array> operands = {
      row_contiguous(cache, stream), row_contiguous(rows, stream), at};
  if (after) operands.push_back(*after);
  return mx::array(
      cache.shape(), cache.dtype(), std::make_shared<KvWrite>(stream), std::move(operands));
}

void KvWrite::run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const auto &cache = inputs[0], &rows = inputs[1];
  auto& out = outputs[0];
  const char* copied = nullptr;
  if (inputs.size() == 4 || cache.is_donatable()) {
    out.copy_shared_buffer(cache);
  } else {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    copied = cache.data<char>();
  }
  cpu::dispatch(
      stream(),
      outputs,
      [copied,
       to = out.data<char>(),
       from = rows.data<char>(),
       lengths = inputs[2].data<int>(),
       batch = cache.shape(0),
       heads = cache.shape(1),
       capacity = cache.shape(2),
       given = rows.shape(2),
       bytes = size_t(cache.shape(3)) * cache.itemsize()] {
        cpu::expect_range("kv_write", "lengths", lengths, batch, capacity - given);
        if (copied) {
          std::memcpy(to, copied, size_t(batch) * heads * capacity * bytes);
        }
        for (int head = 0; head < batch * heads; ++head) {
          std::memcpy(
              to + (size_t(head) * capacity + lengths[head / heads]) * bytes,
              from + size_t(head) * given * bytes,
              given * bytes);
        }
      });
}

void KvWrite::run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const auto &cache = inputs[0], &rows = inputs[1];
  auto& out = outputs[0];
  const std::string type = shader_type(cache.dtype());
  if (inputs.size() == 4 || cache.is_donatable()) {
    out.copy_shared_buffer(cache);
  } else {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    metal::Launch copy(stream(), "kv_write", "kv_copy_" + type, "kv_copy_kernel<" + type + ">", {});
    copy.input(cache, 0);
    copy.output(out, 1);
    copy.threads({cache.shape(3), int(cache.size() / cache.shape(3)), 1}, {32, 4, 1});
  }
  metal::Launch launch(
      stream(), "kv_write", "kv_write_" + type, "kv_write_kernel<" + type + ">", {});
  launch.input(rows, 0);
  launch.input(inputs[2], 1);
  launch.output(out, 2);
  launch.scalar(cache.shape(1), 3);
  launch.scalar(cache.shape(2), 4);
  launch.scalar(rows.shape(2), 5);
  launch.scalar(cache.shape(3), 6);
  launch.threads({cache.shape(3), rows.shape(2), cache.shape(0) * cache.shape(1)}, {32, 4, 1});
}

}  // namespace dflash
