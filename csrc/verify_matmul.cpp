#include "verify_matmul.h"

#include <algorithm>
#include <numeric>

#include "cpu/launch.h"
#include "gpu/cuda.h"
#include "gpu/verify_matmul.h"

namespace dflash {
namespace {

constexpr int kLanes = 16;
constexpr int kRowsAtOnce = 128;  // of x in fp32, for which scratch memory is held

int blocks_of(int outputs) {
  return (outputs + kLanes - 1) / kLanes;
}

cpu::Weights weights_of(const mx::array& weight, int bits) {
  return bits == 8                        ? cpu::Weights::bits8
         : bits == 4                      ? cpu::Weights::bits4
         : weight.dtype() == mx::float32  ? cpu::Weights::f32
         : weight.dtype() == mx::bfloat16 ? cpu::Weights::bf16
                                          : cpu::Weights::f16;
}

/// `shape`, with any number of experts before it if there are experts.
mx::Shape with_experts(bool experts, const mx::array& weight, const mx::Shape& shape) {
  mx::Shape whole(shape);
  if (experts) {
    whole.insert(whole.begin(), weight.ndim() ? weight.shape(0) : -1);
  }
  return whole;
}

void expect_scales(const char* op, const MatmulWeight& w) {
  if (w.scales.has_value() != w.biases.has_value()) {
    refuse(op, "expected scales and biases together");
  }
  if (!w.scales) {
    expect_floating(op, "weight", w.weight);
    return;
  }
  expect_dtype(op, "weight", w.weight, mx::uint32);
  if (w.bits != 4 && w.bits != 8) {
    refuse(op, "expected bits to be 4 or 8 but got ", w.bits);
  }
  if (w.group_size != 32 && w.group_size != 64 && w.group_size != 128) {
    refuse(op, "expected group_size to be 32, 64 or 128 but got ", w.group_size);
  }
  expect_floating(op, "scales", *w.scales);
  expect_dtype(op, "biases", *w.biases, w.scales->dtype());
}

/// Refuses what is no weight; else what it is. `experts`: with a dimension of experts in front.
MatmulFormat format_of(const char* op, const MatmulWeight& w, bool experts) {
  expect_scales(op, w);
  const int dims = 2 + experts;
  MatmulFormat format{.group_size = 0, .bits = 0, .packed = w.packed.has_value()};
  format.gathers = experts;
  if (w.scales) {
    format.group_size = w.group_size;
    format.bits = w.bits;
  }
  const int in_word = w.scales ? 32 / w.bits : 1;
  if (w.packed) {
    std::tie(format.outputs, format.inputs) = *w.packed;
    if (format.outputs < 1 || format.inputs < 1) {
      refuse(op, "expected N and K of at least 1 but got ", format.outputs, ", ", format.inputs);
    }
    const int values = cpu::in_word(weights_of(w.weight, format.bits));
    const int blocks = blocks_of(format.outputs), words = (format.inputs + values - 1) / values;
    mx::Shape shape = {blocks, words, kLanes};
    if (w.weight.dtype() == mx::bfloat16) {
      shape = {blocks, words, kLanes, 2};
    } else if (w.weight.dtype() == mx::float16) {
      shape = {blocks, 2 * words, kLanes};
    }
    expect_shape(op, "the packed weight", w.weight, with_experts(experts, w.weight, shape));
  } else {
    expect_shape(op, "weight", w.weight, mx::Shape(dims, -1));
    expect_not_empty(op, "weight", w.weight);
    format.outputs = w.weight.shape(-2);
    format.inputs = w.weight.shape(-1) * in_word;
  }
  if (w.scales) {
    if (format.inputs % format.group_size != 0) {
      refuse(
          op,
          "expected K to be a multiple of group_size ",
          format.group_size,
          " but got K = ",
          format.inputs);
    }
    const int groups = format.inputs / format.group_size;
    mx::Shape shape = {format.outputs, groups};
    if (w.packed) {
      shape = {blocks_of(format.outputs), groups, kLanes};
    }
    expect_shape(op, "scales", *w.scales, with_experts(experts, w.weight, shape));
    expect_shape(op, "biases", *w.biases, with_experts(experts, w.weight, shape));
  }
  return format;
}

/// Whether the product runs on one of metal/'s kernels.
bool has_shaders(mx::Stream stream) {
#ifdef DFLASH_METAL_MOCK
  return true;
#else
  return stream.device == mx::Device::gpu;
#endif
}

/// What a product is made of, checked: x, weight, then those that are there of scales and biases
/// and bias. On GPUs x and bias are in the result's dtype.
struct Product {
  MatmulFormat format;
  mx::Dtype dtype;
  mx::array x;
  std::vector<mx::array> weight;

  Product(
      const char* op,
      const mx::array& given,
      const MatmulWeight& w,
      const std::optional<mx::array>& bias,
      MatmulFormat of,
      mx::Stream stream)
      : format(of),
        dtype(mx::promote_types(given.dtype(), (w.scales ? *w.scales : w.weight).dtype())),
        x(given) {
    format.biased = bias.has_value();
    if (bias) {
      expect_floating(op, "bias", *bias);
      expect_shape(op, "bias", *bias, with_experts(format.gathers, w.weight, {format.outputs}));
    }
    if (format.packed && has_shaders(stream)) {
      refuse(op, "expected a plain weight on a GPU but got one that pack_matmul made");
    }
    auto in_dtype = [&](const mx::array& each) {
      return has_shaders(stream) ? mx::astype(each, dtype, stream) : each;
    };
    x = row_contiguous(in_dtype(given), stream);
    for (const auto& each : {std::optional(w.weight), w.scales, w.biases}) {
      if (each) weight.push_back(row_contiguous(*each, stream));
    }
    if (bias) weight.push_back(row_contiguous(in_dtype(*bias), stream));
  }

  mx::array run(mx::Shape shape, const std::optional<mx::array>& indices, mx::Stream stream) const {
    shape.push_back(format.outputs);
    if (cuda::runs_on(stream)) {
      return cuda::verify_matmuls(format, x, {weight}, indices, {shape}, stream)[0];
    }
    std::vector<mx::array> operands = {x};
    operands.insert(operands.end(), weight.begin(), weight.end());
    if (indices) operands.push_back(*indices);
    return mx::array(
        shape, dtype, std::make_shared<VerifyMatmul>(stream, format), std::move(operands));
  }

  /// Whether both can be one launch.
  bool like(const Product& other) const {
    auto same = format;
    same.outputs = other.format.outputs;
    bool alike = same == other.format && dtype == other.dtype;
    for (size_t i = 0; alike && i < weight.size(); ++i) {
      alike = weight[i].dtype() == other.weight[i].dtype();
    }
    return alike;
  }
};

/// The order of a VerifyMatmul's inputs.
struct Operands {
  const MatmulFormat& format;
  const std::vector<mx::array>& list;
  const mx::array& x() const {
    return list[0];
  }
  const mx::array& weight() const {
    return list[1];
  }
  const mx::array* scales() const {
    return format.group_size ? &list[2] : nullptr;
  }
  const mx::array* biases() const {
    return format.group_size ? &list[3] : nullptr;
  }
  const mx::array* bias() const {
    return format.biased ? &list[format.group_size ? 4 : 2] : nullptr;
  }
  const mx::array* indices() const {
    return format.gathers ? &list.back() : nullptr;
  }
};

const void* data_of(const mx::array* x) {
  return x ? x->data<void>() : nullptr;
}

/// Which rows of x meet which expert, sorted by expert, and where each result goes.
struct Plan {
  std::vector<int> source, target;
  std::vector<cpu::MatmulJob> jobs;
};

void add_jobs(Plan& plan, int expert, int first, int rows) {
  for (int row = 0; row < rows; row += cpu::kJobRows) {
    plan.jobs.push_back({expert, first + row, std::min(cpu::kJobRows, rows - row)});
  }
}

Plan dense_plan(int rows) {
  Plan plan{std::vector<int>(rows), std::vector<int>(rows), {}};
  std::iota(plan.source.begin(), plan.source.end(), 0);
  std::iota(plan.target.begin(), plan.target.end(), 0);
  add_jobs(plan, 0, 0, rows);
  return plan;
}

/// `shared`: results of one row of x.
Plan gather_plan(const int* indices, int results, int experts, int shared) {
  cpu::expect_range("verify_gather_matmul", "indices", indices, results, experts - 1);
  Plan plan{std::vector<int>(results), std::vector<int>(results), {}};
  std::vector<int> first(experts + 1, 0);
  for (int i = 0; i < results; ++i) ++first[indices[i] + 1];
  for (int e = 0; e < experts; ++e) {
    add_jobs(plan, e, first[e], first[e + 1]);
    first[e + 1] += first[e];
  }
  for (int i = 0; i < results; ++i) {
    const int at = first[indices[i]]++;
    plan.source[at] = i / shared;
    plan.target[at] = i;
  }
  return plan;
}

void run_plan(cpu::Matmul args, const Plan& plan) {
  thread_local std::vector<float> scratch;  // of the stream's thread
  const int values = cpu::in_word(args.weights);
  const size_t padded = (size_t(args.inputs) + values - 1) / values * values;
  const size_t of_row = padded + (args.group ? args.inputs / args.group : 0);
  const auto& kernels = cpu::kernels();
  for (size_t job = 0; job < plan.jobs.size();) {
    std::vector<cpu::MatmulJob> jobs;
    int rows = 0;
    const int first = plan.jobs[job].first;
    for (; job < plan.jobs.size() && rows + plan.jobs[job].rows <= kRowsAtOnce; ++job) {
      jobs.push_back({plan.jobs[job].expert, rows, plan.jobs[job].rows});
      rows += jobs.back().rows;
    }
    if (scratch.size() < rows * of_row) scratch.resize(rows * of_row);
    args.wide = scratch.data();
    args.jobs = jobs.data();
    args.job_count = int(jobs.size());
    args.source = plan.source.data() + first;
    args.target = plan.target.data() + first;
    const size_t read = size_t(rows) * args.inputs;
    cpu::share(read, [&](int part, int parts) { kernels.matmul_widen(args, part, parts); });
    cpu::share(
        read * args.outputs, [&](int part, int parts) { kernels.matmul(args, part, parts); });
  }
}

}  // namespace

std::vector<mx::array> verify_matmuls(
    const mx::array& x,
    const std::vector<MatmulWeight>& weights,
    const std::vector<std::optional<mx::array>>& biases,
    mx::StreamOrDevice where) {
  const char* op = "verify_matmul";
  const auto stream = mx::to_stream(where);
  std::vector<Product> products;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto format = format_of(op, weights[i], false);
    mx::Shape shape(std::max<size_t>(x.ndim(), 1), -1);
    shape.back() = format.inputs;
    expect_shape(op, "x", x, shape);
    expect_not_empty(op, "x", x);
    expect_floating(op, "x", x);
    products.emplace_back(op, x, weights[i], biases[i], format, stream);
  }
  const mx::Shape leading(x.shape().begin(), x.shape().end() - 1);
  auto alike = [&](const Product& each) { return each.like(products[0]); };
  if (products.size() > 1 && cuda::runs_on(stream) &&
      std::all_of(products.begin(), products.end(), alike)) {
    std::vector<std::vector<mx::array>> given;
    std::vector<mx::Shape> shapes;
    for (const auto& each : products) {
      given.push_back(each.weight);
      shapes.push_back(leading);
      shapes.back().push_back(each.format.outputs);
    }
    const auto& first = products[0];
    return cuda::verify_matmuls(first.format, first.x, given, std::nullopt, shapes, stream);
  }
  std::vector<mx::array> results;
  for (const auto& each : products) results.push_back(each.run(leading, std::nullopt, stream));
  return results;
}

mx::array verify_matmul(
    const mx::array& x,
    const MatmulWeight& weight,
    const std::optional<mx::array>& bias,
    mx::StreamOrDevice stream) {
  return verify_matmuls(x, {weight}, {bias}, stream)[0];
}

mx::array verify_gather_matmul(
    const mx::array& x,
    const MatmulWeight& weight,
    const mx::array& indices,
    const std::optional<mx::array>& bias,
    mx::StreamOrDevice where) {
  const char* op = "verify_gather_matmul";
  const auto stream = mx::to_stream(where);
  const auto format = format_of(op, weight, true);
  if (indices.ndim() == 0) {
    expect_shape(op, "indices", indices, {-1});
  }
  expect_not_empty(op, "indices", indices);
  auto shape = indices.shape();
  if (x.ndim() > 1 && x.shape(-2) == 1) {
    shape.back() = 1;
  }
  shape.push_back(format.inputs);
  expect_shape(op, "x", x, shape);
  expect_floating(op, "x", x);
  return Product(op, x, weight, bias, format, stream)
      .run(indices.shape(), as_int32(op, "indices", indices, stream), stream);
}

std::tuple<mx::array, std::optional<mx::array>, std::optional<mx::array>> pack_matmul(
    const MatmulWeight& w, mx::StreamOrDevice where) {
  const char* op = "pack_matmul";
  const auto stream = mx::to_stream(where);
  const bool experts = w.weight.ndim() == 3;
  format_of(op, w, experts);
  if (has_shaders(stream)) {
    refuse(op, "expected a stream of the CPU but got one of ", stream.device);
  }
  auto pack = [&](const mx::array& x, bool pairs, int columns) {
    mx::Shape shape = {blocks_of(x.shape(-2)), columns, kLanes};
    if (pairs) {
      shape = {blocks_of(x.shape(-2)), columns / 2, kLanes, 2};
    }
    return mx::array(
        with_experts(experts, x, shape),
        x.dtype(),
        std::make_shared<PackWeight>(stream, pairs),
        {row_contiguous(x, stream)});
  };
  const int columns = w.weight.shape(-1);
  if (w.scales) {
    const int groups = w.scales->shape(-1);
    return {
        pack(w.weight, false, columns),
        pack(*w.scales, false, groups),
        pack(*w.biases, false, groups)};
  }
  const bool halves = w.weight.dtype() != mx::float32;
  const bool pairs = w.weight.dtype() == mx::bfloat16;
  return {pack(w.weight, pairs, columns + (halves && columns % 2)), std::nullopt, std::nullopt};
}

void VerifyMatmul::run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  cpu::allocate(outputs);
  const Operands given{format_, inputs};
  auto type_of = [](const mx::array* x) { return x ? cpu_type(x->dtype()) : cpu::Type::f32; };
  const cpu::Matmul args{
      .x = given.x().data<void>(),
      .weight = given.weight().data<void>(),
      .scales = data_of(given.scales()),
      .biases = data_of(given.biases()),
      .bias = data_of(given.bias()),
      .out = outputs[0].data<void>(),
      .outputs = format_.outputs,
      .inputs = format_.inputs,
      .group = format_.group_size,
      .packed = format_.packed,
      .weights = weights_of(given.weight(), format_.bits),
      .x_type = cpu_type(given.x().dtype()),
      .scale_type = type_of(given.scales()),
      .bias_type = type_of(given.bias()),
      .out_type = cpu_type(outputs[0].dtype())};
  const int results = int(outputs[0].size() / format_.outputs);
  if (!format_.gathers) {
    cpu::dispatch(stream(), outputs, [args, results] { run_plan(args, dense_plan(results)); });
    return;
  }
  const int shared = results / int(given.x().size() / format_.inputs);
  cpu::dispatch(
      stream(),
      outputs,
      [args,
       results,
       shared,
       experts = given.weight().shape(0),
       indices = given.indices()->data<int>()] {
        run_plan(args, gather_plan(indices, results, experts, shared));
      });
}

void PackWeight::run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  cpu::allocate(outputs);
  const auto &from = inputs[0], &to = outputs[0];
  const cpu::PackWeight args{
      .from = from.data<void>(),
      .to = outputs[0].data<void>(),
      .experts = from.ndim() == 3 ? from.shape(0) : 1,
      .outputs = from.shape(-2),
      .row_bytes = int(from.itemsize()) * from.shape(-1),
      .units = pairs_ ? to.shape(-3) : to.shape(-2),
      .unit_bytes = int(from.itemsize()) * (pairs_ ? 2 : 1)};
  cpu::dispatch(stream(), outputs, [args, work = from.size(), run = cpu::kernels().pack_weight] {
    cpu::share(work, [&](int part, int parts) { run(args, part, parts); });
  });
}

void PackWeight::run_metal(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::logic_error("[pack_matmul] is for the CPU.");  // refused at the call
}

}  // namespace dflash
