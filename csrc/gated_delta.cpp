#include "gated_delta.h"

#include "cpu/launch.h"
#include "gpu/cuda.h"
#include "gpu/metal.h"

namespace dflash {
namespace {

constexpr int kMaxKeyDim = 256;
constexpr int kRowsPerSimdgroup = 4;  // as in metal/gated_delta.h
constexpr int kSimdgroups = 4;

struct Dims {
  int batch, inputs, tape_inputs, key_heads, value_heads, key_dim, value_dim;
};

/// The order of a GatedDelta's inputs. Absent ones are not in the list.
struct Operands {
  GatedDeltaParts parts;
  const std::vector<mx::array>& list;
  int inputs_at() const {
    return 1;
  }
  int tape_at() const {
    return 1 + (parts.has_inputs ? 5 + parts.has_mask : 0);
  }
  const mx::array& state() const {
    return list[0];
  }
  const mx::array* input(int i) const {  // q, k, v, g, beta
    return parts.has_inputs ? &list[inputs_at() + i] : nullptr;
  }
  const mx::array* mask() const {
    return parts.has_mask ? &list[inputs_at() + 5] : nullptr;
  }
  const mx::array* tape(int i) const {  // g, k, delta, keep
    return parts.has_tape ? &list[tape_at() + i] : nullptr;
  }
  const mx::array* valid() const {
    return parts.has_valid ? &list[tape_at() + 4] : nullptr;
  }
  Dims dims() const {
    const auto& k = parts.has_inputs ? *input(1) : *tape(1);
    return {
        state().shape(0),
        parts.has_inputs ? k.shape(1) : 0,
        parts.has_tape ? tape(1)->shape(1) : 0,
        k.shape(2),
        state().shape(1),
        state().shape(3),
        state().shape(2)};
  }
  mx::Dtype dtype() const {
    return parts.has_inputs ? input(1)->dtype() : tape(1)->dtype();
  }
};

void expect_state(const char* op, const mx::array& state) {
  expect_shape(op, "state", state, {-1, -1, -1, -1});
  expect_dtype(op, "state", state, mx::float32);
  expect_not_empty(op, "state", state);
  const int key_dim = state.shape(3);
  if (key_dim % 32 != 0 || key_dim > kMaxKeyDim) {
    refuse(op, "expected Dk to be a multiple of 32 up to ", kMaxKeyDim, " but got ", key_dim);
  }
}

void expect_heads(const char* op, const mx::array& k, const mx::array& state) {
  const int key_heads = k.shape(2), value_heads = state.shape(1);
  if (key_heads == 0 || value_heads % key_heads != 0) {
    refuse(
        op, "expected Hv to be a multiple of Hk but got Hk = ", key_heads, ", Hv = ", value_heads);
  }
}

/// g [B, T, Hv] or [B, T, Hv, Dk]; true if it is the latter.
bool expect_decay(
    const char* op, const char* name, const mx::array& g, int inputs, const mx::array& state) {
  const bool vector = g.ndim() == 4;
  if (vector) {
    expect_shape(op, name, g, {state.shape(0), inputs, state.shape(1), state.shape(3)});
  } else {
    expect_shape(op, name, g, {state.shape(0), inputs, state.shape(1)});
  }
  expect_dtype(op, name, g, mx::float32);
  return vector;
}

void expect_inputs(
    const char* op,
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& g,
    const mx::array& beta,
    const mx::array& state,
    const std::optional<mx::array>& mask) {
  expect_state(op, state);
  expect_shape(op, "k", k, {state.shape(0), -1, -1, state.shape(3)});
  const int inputs = k.shape(1);
  if (inputs == 0) {
    refuse(op, "expected at least one input but got T = 0");
  }
  expect_heads(op, k, state);
  expect_shape(op, "q", q, k.shape());
  expect_shape(op, "v", v, {state.shape(0), inputs, state.shape(1), state.shape(2)});
  expect_decay(op, "g", g, inputs, state);
  expect_shape(op, "beta", beta, {state.shape(0), inputs, state.shape(1)});
  expect_dtype(op, "beta", beta, mx::float32);
  expect_floating(op, "v", v);
  expect_dtype(op, "q", q, v.dtype());
  expect_dtype(op, "k", k, v.dtype());
  if (mask) {
    expect_shape(op, "mask", *mask, {state.shape(0), inputs});
    expect_dtype(op, "mask", *mask, mx::bool_);
  }
}

bool expect_tape(const char* op, const Tape& tape, const mx::array& state) {
  expect_shape(op, "tape.k", tape.k, {state.shape(0), -1, -1, state.shape(3)});
  expect_floating(op, "tape.k", tape.k);
  expect_heads(op, tape.k, state);
  const int inputs = tape.k.shape(1);
  if (inputs == 0) {
    refuse(op, "expected a tape of at least one input but got T = 0");
  }
  expect_shape(
      op, "tape.delta", tape.delta, {state.shape(0), inputs, state.shape(1), state.shape(2)});
  expect_dtype(op, "tape.delta", tape.delta, mx::float32);
  if (tape.valid) {
    expect_shape(op, "tape.valid", *tape.valid, {state.shape(0), inputs});
    expect_dtype(op, "tape.valid", *tape.valid, mx::bool_);
  }
  return expect_decay(op, "tape.g", tape.g, inputs, state);
}

void append_tape(
    const char* op,
    std::vector<mx::array>& operands,
    const Tape& tape,
    const mx::array& keep,
    mx::Stream stream) {
  for (const auto& x : {tape.g, tape.k, tape.delta}) {
    operands.push_back(row_contiguous(x, stream));
  }
  operands.push_back(per_row(op, "keep", keep, tape.k.shape(0), stream));
  if (tape.valid) {
    operands.push_back(row_contiguous(*tape.valid, stream));
  }
}

/// The kernel's body for CUDA: the same template, its operands by name.
std::vector<mx::array> run_cuda(
    const GatedDeltaParts& parts,
    const std::vector<mx::array>& operands,
    std::vector<mx::Shape> shapes,
    std::vector<mx::Dtype> dtypes,
    mx::Stream stream) {
  const Operands o{parts, operands};
  const Dims d = o.dims();
  std::vector<std::string> names = {"state"}, outputs;
  auto name = [&](std::initializer_list<const char*> list) {
    names.insert(names.end(), list.begin(), list.end());
  };
  if (parts.has_inputs) name({"q", "k", "v", "g", "beta"});
  if (parts.has_mask) name({"mask"});
  if (parts.has_tape) name({"tape_g", "tape_k", "tape_delta", "keep"});
  if (parts.has_valid) name({"tape_valid"});
  if (parts.has_inputs) outputs.push_back("y");
  if (parts.writes_delta) outputs.push_back("delta");
  if (parts.commits || parts.has_tape) outputs.push_back("state_out");
  auto pointer = [&](bool present, const char* type, const char* name) {
    return present ? std::string(name) : std::string("static_cast<") + type + "*>(nullptr)";
  };
  const cuda::Text text{
      "gated_delta",
      {"gated_delta.h"},
      names,
      outputs,
      {{"T", o.dtype()},
       {"Dk", d.key_dim},
       {"vector_decay", parts.vector_decay},
       {"Hk", d.key_heads},
       {"Hv", d.value_heads},
       {"Dv", d.value_dim},
       {"has_mask", parts.has_mask},
       {"has_tape", parts.has_tape},
       {"has_valid", parts.has_valid},
       {"writes_delta", parts.writes_delta},
       {"commits", parts.commits}},
      [&] {
        const bool in = parts.has_inputs, tape = parts.has_tape;
        return "gated_delta<T, Dk, vector_decay>(" + pointer(in, "const T", "q") + ", " +
               pointer(in, "const T", "k") + ", " + pointer(in, "const T", "v") + ", " +
               pointer(in, "const float", "g") + ", " + pointer(in, "const float", "beta") +
               ", state, " + pointer(parts.has_mask, "const bool", "mask") + ", " +
               pointer(tape, "const float", "tape_g") + ", " + pointer(tape, "const T", "tape_k") +
               ", " + pointer(tape, "const float", "tape_delta") + ", " +
               pointer(parts.has_valid, "const bool", "tape_valid") + ", " +
               pointer(tape, "const int", "keep") + ", " + pointer(in, "T", "y") + ", " +
               pointer(parts.writes_delta, "float", "delta") + ", " +
               pointer(parts.commits || tape, "float", "state_out") +
               ", inputs, replayed, Hk, Hv, Dv, has_mask, has_tape, has_valid, writes_delta,"
               " commits, int(blockIdx.x), int(blockIdx.y * blockDim.y + threadIdx.y),"
               " int(threadIdx.x));\n";
      }};
  const int groups =
      (d.value_dim + kRowsPerSimdgroup * kSimdgroups - 1) / (kRowsPerSimdgroup * kSimdgroups);
  return cuda::launch(
      text,
      operands,
      {{"inputs", d.inputs}, {"replayed", d.tape_inputs}},
      shapes,
      dtypes,
      {32 * d.batch * d.value_heads, groups * kSimdgroups, 1},  // y and z end at 65,535
      {32, kSimdgroups, 1},
      stream);
}

std::vector<mx::array> run(
    const GatedDeltaParts& parts,
    std::vector<mx::array> operands,
    std::vector<mx::Shape> shapes,
    std::vector<mx::Dtype> dtypes,
    mx::Stream stream) {
  if (cuda::runs_on(stream)) {
    return run_cuda(parts, operands, std::move(shapes), std::move(dtypes), stream);
  }
  return mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<GatedDelta>(stream, parts), std::move(operands));
}

}  // namespace

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
    mx::StreamOrDevice where) {
  const char* op = "gated_delta_verify";
  const auto stream = mx::to_stream(where);
  expect_inputs(op, q, k, v, g, beta, state, mask);
  if (tape.has_value() != keep.has_value()) {
    refuse(op, "expected tape and keep together but got only ", tape ? "tape" : "keep");
  }
  GatedDeltaParts parts{
      .has_inputs = true,
      .has_tape = tape.has_value(),
      .has_mask = mask.has_value(),
      .has_valid = tape && tape->valid,
      .writes_delta = true,
      .commits = false,
      .vector_decay = g.ndim() == 4};
  std::vector<mx::array> operands;
  for (const auto& x : {state, q, k, v, g, beta}) {
    operands.push_back(row_contiguous(x, stream));
  }
  if (mask) {
    operands.push_back(row_contiguous(*mask, stream));
  }
  std::vector<mx::Shape> shapes = {v.shape(), v.shape()};
  std::vector<mx::Dtype> dtypes = {v.dtype(), mx::float32};
  if (tape) {
    if (expect_tape(op, *tape, state) != parts.vector_decay) {
      refuse(
          op, "expected tape.g and g of the same rank but got ", tape->g.ndim(), " and ", g.ndim());
    }
    expect_dtype(op, "tape.k", tape->k, k.dtype());
    if (tape->k.shape(2) != k.shape(2)) {
      refuse(
          op,
          "expected tape.k and k with the same Hk but got ",
          tape->k.shape(2),
          " and ",
          k.shape(2));
    }
    append_tape(op, operands, *tape, *keep, stream);
    shapes.push_back(state.shape());
    dtypes.push_back(mx::float32);
  }
  auto out = run(parts, std::move(operands), std::move(shapes), std::move(dtypes), stream);
  return {out[0], out[1], tape ? out[2] : state};
}

std::pair<mx::array, mx::array> gated_delta_step(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& g,
    const mx::array& beta,
    const mx::array& state,
    const std::optional<mx::array>& mask,
    mx::StreamOrDevice where) {
  const auto stream = mx::to_stream(where);
  expect_inputs("gated_delta_step", q, k, v, g, beta, state, mask);
  GatedDeltaParts parts{
      .has_inputs = true,
      .has_tape = false,
      .has_mask = mask.has_value(),
      .has_valid = false,
      .writes_delta = false,
      .commits = true,
      .vector_decay = g.ndim() == 4};
  std::vector<mx::array> operands;
  for (const auto& x : {state, q, k, v, g, beta}) {
    operands.push_back(row_contiguous(x, stream));
  }
  if (mask) {
    operands.push_back(row_contiguous(*mask, stream));
  }
  auto out =
      run(parts, std::move(operands), {v.shape(), state.shape()}, {v.dtype(), mx::float32}, stream);
  return {out[0], out[1]};
}

mx::array gated_delta_replay(
    const mx::array& state, const Tape& tape, const mx::array& keep, mx::StreamOrDevice where) {
  const char* op = "gated_delta_replay";
  const auto stream = mx::to_stream(where);
  expect_state(op, state);
  GatedDeltaParts parts{
      .has_inputs = false,
      .has_tape = true,
      .has_mask = false,
      .has_valid = tape.valid.has_value(),
      .writes_delta = false,
      .commits = false,
      .vector_decay = expect_tape(op, tape, state)};
  std::vector<mx::array> operands = {row_contiguous(state, stream)};
  append_tape(op, operands, tape, keep, stream);
  return run(parts, std::move(operands), {state.shape()}, {mx::float32}, stream)[0];
}

void GatedDelta::run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const Operands o{parts_, inputs};
  const Dims d = o.dims();
  cpu::allocate(outputs);
  auto data = [](const mx::array* x) { return x ? x->data<void>() : nullptr; };
  auto floats = [&](const mx::array* x) { return static_cast<const float*>(data(x)); };
  auto bools = [&](const mx::array* x) { return static_cast<const bool*>(data(x)); };
  const bool writes_state = parts_.commits || parts_.has_tape;
  cpu::GatedDelta args{
      .q = data(o.input(0)),
      .k = data(o.input(1)),
      .v = data(o.input(2)),
      .g = floats(o.input(3)),
      .beta = floats(o.input(4)),
      .state = o.state().data<float>(),
      .mask = bools(o.mask()),
      .tape_g = floats(o.tape(0)),
      .tape_k = data(o.tape(1)),
      .tape_delta = floats(o.tape(2)),
      .tape_valid = bools(o.valid()),
      .keep = static_cast<const int*>(data(o.tape(3))),
      .y = parts_.has_inputs ? outputs.front().data<void>() : nullptr,
      .delta = parts_.writes_delta ? outputs[1].data<float>() : nullptr,
      .state_out = writes_state ? outputs.back().data<float>() : nullptr,
      .commits = parts_.commits,
      .vector_decay = parts_.vector_decay,
      .batch = d.batch,
      .inputs = d.inputs,
      .tape_inputs = d.tape_inputs,
      .key_heads = d.key_heads,
      .value_heads = d.value_heads,
      .key_dim = d.key_dim,
      .value_dim = d.value_dim,
      .type = cpu_type(o.dtype())};
  const char* op = parts_.has_inputs ? "gated_delta_verify" : "gated_delta_replay";
  cpu::dispatch(stream(), outputs, [args, op, run = cpu::kernels().gated_delta] {
    if (args.tape_g) {
      cpu::expect_range(op, "keep", args.keep, args.batch, args.tape_inputs);
    }
    const size_t work = size_t(args.batch) * args.value_heads * args.value_dim * args.key_dim *
                        (args.inputs + args.tape_inputs);
    cpu::share(work, [&](int part, int parts) { run(args, part, parts); });
  });
}

void GatedDelta::run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const Operands o{parts_, inputs};
  const Dims d = o.dims();
  const std::string type = shader_type(o.dtype());
  const std::string suffix =
      type + "_" + std::to_string(d.key_dim) + (parts_.vector_decay ? "_vector" : "_scalar");
  metal::Launch launch(
      stream(),
      "gated_delta",
      "gated_delta_" + suffix,
      "gated_delta_kernel<" + type + ", " + std::to_string(d.key_dim) + ", " +
          (parts_.vector_decay ? "true" : "false") + ">",
      {parts_.has_mask, parts_.has_tape, parts_.has_valid, parts_.writes_delta, parts_.commits});
  metal::allocate(outputs);
  const mx::array& unused = o.state();  // a buffer that the kernel does not touch
  auto in = [&](const mx::array* x, int index) { launch.input(x ? *x : unused, index); };
  for (int i = 0; i < 5; ++i) in(o.input(i), i);
  in(&o.state(), 5);
  in(o.mask(), 6);
  for (int i = 0; i < 3; ++i) in(o.tape(i), 7 + i);
  in(o.valid(), 10);
  in(o.tape(3), 11);
  auto out = [&](bool present, mx::array& x, int index) {
    present ? launch.output(x, index) : launch.input(unused, index);
  };
  out(parts_.has_inputs, outputs.front(), 12);
  out(parts_.writes_delta, outputs[parts_.writes_delta ? 1 : 0], 13);
  out(parts_.commits || parts_.has_tape, outputs.back(), 14);
  int index = 15;
  for (int x : {d.inputs, d.tape_inputs, d.key_heads, d.value_heads, d.value_dim}) {
    launch.scalar(x, index++);
  }
  const int simdgroups =
      std::min(kSimdgroups, (d.value_dim + kRowsPerSimdgroup - 1) / kRowsPerSimdgroup);
  const int rows = kRowsPerSimdgroup * simdgroups;
  launch.threadgroups(
      {1, (d.value_dim + rows - 1) / rows, d.batch * d.value_heads}, {32, simdgroups, 1});
}

}  // namespace dflash
