// The only file that knows nanobind. Docstrings and defaults: python/dflash_native/ops.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/variant.h>

#include "causal_conv1d.h"
#include "cpu/parallel.h"
#include "gated_delta.h"
#include "gated_delta_gates.h"
#include "gpu/metal.h"
#include "gpu/sources.h"
#include "kv_write.h"
#include "rowwise.h"
#include "verify_attention.h"
#include "verify_matmul.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Array = mlx::core::array;
using Stream = mlx::core::StreamOrDevice;
using TapeTuple = std::tuple<Array, Array, Array, std::optional<Array>>;

dflash::Tape to_tape(const TapeTuple& tape) {
  const auto& [g, k, delta, valid] = tape;
  return {g, k, delta, valid};
}

}  // namespace

NB_MODULE(_ext, m) {
  m.doc() = "Native operations of dflash_native; use dflash_native.ops.";
  m.attr("MLX_VERSION") = DFLASH_MLX_VERSION;
  m.attr("NANOBIND_VERSION") = NANOBIND_VERSION;

  m.def("round_trip", [](const Array& x) { return mlx::core::copy(x); }, "x"_a);
  m.def("cpu_isa", [] { return std::string(dflash::cpu::kernels().name); });
  m.def("cpu_threads", [] { return dflash::cpu::threads(); });
  m.def("metal_kernel_source", [] { return dflash::metal::kernel_source(); });
  m.def("shader_hash", [] { return dflash::embedded_hash(); });

  m.def(
      "gated_delta_verify",
      [](const Array& q,
         const Array& k,
         const Array& v,
         const Array& g,
         const Array& beta,
         const Array& state,
         const std::optional<TapeTuple>& tape,
         const std::optional<Array>& keep,
         const std::optional<Array>& mask,
         Stream stream) {
        std::optional<dflash::Tape> last;
        if (tape) {
          last = to_tape(*tape);
        }
        return dflash::gated_delta_verify(q, k, v, g, beta, state, last, keep, mask, stream);
      },
      "q"_a,
      "k"_a,
      "v"_a,
      "g"_a,
      "beta"_a,
      "state"_a,
      "tape"_a = nb::none(),
      "keep"_a = nb::none(),
      "mask"_a = nb::none(),
      "stream"_a = nb::none());
  m.def(
      "gated_delta_step",
      &dflash::gated_delta_step,
      "q"_a,
      "k"_a,
      "v"_a,
      "g"_a,
      "beta"_a,
      "state"_a,
      "mask"_a = nb::none(),
      "stream"_a = nb::none());
  m.def(
      "gated_delta_replay",
      [](const Array& state, const TapeTuple& tape, const Array& keep, Stream stream) {
        return dflash::gated_delta_replay(state, to_tape(tape), keep, stream);
      },
      "state"_a,
      "tape"_a,
      "keep"_a,
      "stream"_a = nb::none());
  m.def(
      "gated_delta_gates",
      &dflash::gated_delta_gates,
      "a"_a,
      "b"_a,
      "A_log"_a,
      "dt_bias"_a,
      "stream"_a = nb::none());
  m.def(
      "causal_conv1d_verify",
      &dflash::causal_conv1d_verify,
      "x"_a,
      "weight"_a,
      "window"_a,
      "stream"_a = nb::none());
  m.def("conv_window", &dflash::conv_window, "window"_a, "x"_a, "keep"_a, "stream"_a = nb::none());
  m.def("rms_norm", &dflash::rms_norm, "x"_a, "weight"_a, "eps"_a, "stream"_a = nb::none());
  m.def(
      "rms_norm_gated",
      &dflash::rms_norm_gated,
      "x"_a,
      "gate"_a,
      "weight"_a,
      "eps"_a,
      "stream"_a = nb::none());
  m.def(
      "add_rms_norm",
      &dflash::add_rms_norm,
      "x"_a,
      "residual"_a,
      "weight"_a,
      "eps"_a,
      "stream"_a = nb::none());
  m.def("swiglu", &dflash::swiglu, "gate"_a, "up"_a, "stream"_a = nb::none());
  m.def("sigmoid_gate", &dflash::sigmoid_gate, "x"_a, "gate"_a, "stream"_a = nb::none());
  m.def(
      "rope",
      &dflash::rope,
      "x"_a,
      "lengths"_a,
      "dims"_a,
      "base"_a = nb::none(),
      "freqs"_a = nb::none(),
      "scale"_a = 1.0f,
      "traditional"_a = false,
      "stream"_a = nb::none());
  m.def(
      "verify_attention",
      &dflash::verify_attention,
      "q"_a,
      "k"_a,
      "v"_a,
      "lengths"_a,
      "scale"_a,
      "window"_a = nb::none(),
      "causal"_a = true,
      "mask"_a = nb::none(),
      "sinks"_a = nb::none(),
      "stream"_a = nb::none());
  m.def(
      "kv_write",
      &dflash::kv_write,
      "cache"_a,
      "new"_a,
      "lengths"_a,
      "starts"_a,
      "after"_a,
      "stream"_a = nb::none());
  m.def(
      "pack_matmul",
      [](const Array& weight,
         const std::optional<Array>& scales,
         const std::optional<Array>& biases,
         int group_size,
         int bits,
         Stream stream) {
        return dflash::pack_matmul({weight, scales, biases, group_size, bits, {}}, stream);
      },
      "weight"_a,
      "scales"_a,
      "biases"_a,
      "group_size"_a,
      "bits"_a,
      "stream"_a = nb::none());
  m.def(
      "verify_matmul",
      [](const Array& x,
         const Array& weight,
         const std::optional<Array>& scales,
         const std::optional<Array>& biases,
         const std::optional<Array>& bias,
         int group_size,
         int bits,
         std::optional<std::pair<int, int>> packed,
         Stream stream) {
        return dflash::verify_matmul(
            x, {weight, scales, biases, group_size, bits, packed}, bias, stream);
      },
      "x"_a,
      "weight"_a,
      "scales"_a,
      "biases"_a,
      "bias"_a,
      "group_size"_a,
      "bits"_a,
      "packed"_a,
      "stream"_a = nb::none());
  using Weight = std::tuple<
      Array,
      std::optional<Array>,
      std::optional<Array>,
      std::optional<Array>,
      int,
      int,
      std::optional<std::pair<int, int>>>;
  m.def(
      "verify_matmuls",
      [](const Array& x, const std::vector<Weight>& given, Stream stream) {
        std::vector<dflash::MatmulWeight> weights;
        std::vector<std::optional<Array>> added;
        for (const auto& [weight, scales, biases, bias, group_size, bits, packed] : given) {
          weights.push_back({weight, scales, biases, group_size, bits, packed});
          added.push_back(bias);
        }
        return dflash::verify_matmuls(x, weights, added, stream);
      },
      "x"_a,
      "weights"_a,
      "stream"_a = nb::none());
  m.def(
      "verify_gather_matmul",
      [](const Array& x,
         const Array& weight,
         const Array& indices,
         const std::optional<Array>& scales,
         const std::optional<Array>& biases,
         const std::optional<Array>& bias,
         int group_size,
         int bits,
         std::optional<std::pair<int, int>> packed,
         Stream stream) {
        return dflash::verify_gather_matmul(
            x, {weight, scales, biases, group_size, bits, packed}, indices, bias, stream);
      },
      "x"_a,
      "weight"_a,
      "indices"_a,
      "scales"_a,
      "biases"_a,
      "bias"_a,
      "group_size"_a,
      "bits"_a,
      "packed"_a,
      "stream"_a = nb::none());
}
