// The gated delta rule with a tape. Shapes and contracts: python/dflash_native/ops.py.
#pragma once

#include <optional>
#include <tuple>

#include "common.h"

namespace dflash {

/// The inputs of one verify, as replay needs them.
struct Tape {
  mx::array g;                     ///< [B, T, Hv] or [B, T, Hv, Dk], fp32
  mx::array k;                     ///< [B, T, Hk, Dk]
  mx::array delta;                 ///< [B, T, Hv, Dv], fp32
  std::optional<mx::array> valid;  ///< [B, T] bool
};

/// Returns y, delta and the checkpoint: the state after `keep` inputs of `tape`, or `state`.
std::tuple<mx::array, mx::array, mx::array> gated_delta_verify(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& g,
    const mx::array& beta,
    const mx::array& state,
    const std::optional<Tape>& tape,
    const std::optional<mx::array>& keep,
    const std::optional<mx::array>& mask,
    mx::StreamOrDevice stream = {});

/// Returns y and the state after all inputs.
std::pair<mx::array, mx::array> gated_delta_step(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& g,
    const mx::array& beta,
    const mx::array& state,
    const std::optional<mx::array>& mask,
    mx::StreamOrDevice stream = {});

/// Returns the state after the first `keep` inputs of `tape`.
mx::array gated_delta_replay(
    const mx::array& state,
    const Tape& tape,
    const mx::array& keep,
    mx::StreamOrDevice stream = {});

/// One kernel serves the three operations; the fields say which parts of it run.
struct GatedDeltaParts {
  bool has_inputs;    ///< verify, step
  bool has_tape;      ///< verify with the last round's tape, replay
  bool has_mask;      ///< of the inputs
  bool has_valid;     ///< of the tape
  bool writes_delta;  ///< verify
  bool commits;       ///< step: the state after the inputs is written
  bool vector_decay;  ///< g has a column for each key dimension
  bool operator==(const GatedDeltaParts&) const = default;
};

class GatedDelta : public KernelPrimitive {
 public:
  GatedDelta(mx::Stream stream, GatedDeltaParts parts) : KernelPrimitive(stream), parts_(parts) {
  }
  const char* name() const override {
    return "GatedDelta";
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return parts_ == static_cast<const GatedDelta&>(other).parts_;
  }

 protected:
  void run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

 private:
  GatedDeltaParts parts_;
};

}  // namespace dflash
