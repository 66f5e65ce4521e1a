#include "tools/bench/gpu_bench.h"

#include <algorithm>
#include <chrono>
#include <fstream>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "base/stored_elements.h"
#include "engine/bound/bound.h"
#include "engine/bound/planned_step.h"
#include "engine/engine_access.h"
#include "engine/store/storage_queue.h"
#include "tools/bench/io_bench.h"
#include "tools/gpt/model/counter_random.h"
#include "tools/gpt/model/gpt_model.h"
#include "tools/gpt/train/gpu_trainer.h"
#include "tools/report/median.h"
#include "tools/report/plan_rates.h"

namespace sluice {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

GpuSpread gpu_spread(std::vector<double> values) {
  SLUICE_CHECK(!values.empty(), "a spread of something");
  const auto [least, most] = std::ranges::minmax(values);
  return {.median = median(values), .least = least, .most = most};
}

AdamKernelBench bench_adam_kernel(Device& device, DeviceMath& math, std::uint64_t parameters,
                                  unsigned rounds) {
  const Stream stream(device, "benchmark");
  const Event begin(device);
  const Event end(device);
  const auto array = [&](std::uint64_t element_bytes) {
    return DeviceBuffer(device, parameters * element_bytes, "a benchmark's state");
  };
  const DeviceBuffer parameter = array(2);
  const DeviceBuffer low = array(2);
  const DeviceBuffer exp_avg = array(4);
  const DeviceBuffer exp_avg_sq = array(4);
  const DeviceBuffer gradient = array(2);
  const DeviceBuffer flag(device, sizeof(std::uint32_t), "a benchmark's flag");
  const DeviceUpdate update{.parameter_type = DType::kBf16,
                            .gradient_type = DType::kBf16,
                            .parameter = parameter.data(),
                            .low = reinterpret_cast<std::int16_t*>(low.data()),
                            .exp_avg = reinterpret_cast<float*>(exp_avg.data()),
                            .exp_avg_sq = reinterpret_cast<float*>(exp_avg_sq.data()),
                            .gradient = gradient.data(),
                            .element_count = parameters,
                            .non_finite = reinterpret_cast<std::uint32_t*>(flag.data())};
  const AdamCoefficients coefficients = adam_coefficients({}, 1e-3, 10, 1.0f);
  // Nanoseconds on the stream.
  const auto time = [&](const auto& work) {
    device.record(begin.id(), stream.id());
    work();
    device.record(end.id(), stream.id());
    device.synchronize(end.id());
    return static_cast<double>(std::max<std::int64_t>(device.elapsed_ns(begin.id(), end.id()), 1));
  };
  const auto adam = [&] { math.update(coefficients, update, stream.id()); };
  const auto copy = [&] {
    device.copy(exp_avg_sq.data(), exp_avg.data(), exp_avg.size_bytes(), stream.id());
  };
  std::vector<double> rates;
  std::vector<double> copy_rates;
  std::vector<double> percents;
  (void)time(adam);
  (void)time(copy);
  for (unsigned round = 0; round < rounds; ++round) {
    rates.push_back(static_cast<double>(parameters * kAdamBytesPerParameter) / time(adam));
    copy_rates.push_back(static_cast<double>(2 * exp_avg.size_bytes()) / time(copy));
    percents.push_back(100 * rates.back() / copy_rates.back());
  }
  return {.parameters = parameters,
          .gb_per_s = gpu_spread(rates),
          .copy_gb_per_s = gpu_spread(copy_rates),
          .percent = gpu_spread(percents)};
}

void write_random_tokens(const std::string& path, std::uint32_t vocabulary, std::uint64_t count) {
  const gpt::CounterRandom random(1, "tokens");
  std::ofstream file(path, std::ios::binary);
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto token = static_cast<std::uint16_t>(random.bits(i) % vocabulary);
    file.write(reinterpret_cast<const char*>(&token), sizeof(token));
  }
  if (!file.flush()) throw Error(ErrorCode::kInput, "cannot write \"" + path + "\"");
}

namespace {

// Small values of both signs, cheap to make: they only have to differ.
void fill_cheaply(std::uint64_t first, std::span<float> values) {
  for (std::uint64_t i = 0; i < values.size(); ++i) {
    const std::uint64_t hash = (first + i) * 0x9e3779b97f4a7c15u;
    values[i] = (static_cast<float>(hash >> 40) * 0x1p-24f - 0.5f) * 0.06f;
  }
}

// The values that training begins with. A GPU computes faster on zeros, because it draws less
// power.
void fill_parameters(Device& device, std::byte* target, std::uint64_t count, DType type) {
  std::vector<float> values(count);
  fill_cheaply(0, values);
  AlignedBuffer host(count * size_of(type), "a benchmark's values");
  with_element_type(type, [&]<class T>(T*) {
    for (std::uint64_t i = 0; i < count; ++i)
      store(values[i], reinterpret_cast<T*>(host.data())[i]);
  });
  device.register_host_memory(host.span());
  const Stream stream(device, "values");
  device.copy(target, host.data(), count * size_of(type), stream.id());
  device.synchronize(stream.id());
  device.unregister_host_memory(host.span());
}

// The passes of a step over parameters that stay where they are: all blocks share one block's, so
// that a model of any size fits.
double compute_step_s(const TrainConfig& config, const Dataset& dataset, Device& device,
                      gpt::DeviceOps& ops, gpt::DeviceGpt& gpt, unsigned steps) {
  const ModelSpec spec = gpt::gpt_model_spec(config.model);
  const Stream stream(device, "benchmark");
  const auto unit_memory = [&](const UnitSpec& unit, DType type, std::vector<std::byte*>& tensors) {
    std::uint64_t size_bytes = 0;
    for (const TensorSpec& tensor : unit.tensors)
      size_bytes += align_up(tensor.element_count() * size_of(type), 256);
    DeviceBuffer memory(device, size_bytes, "a benchmark's unit");
    std::byte* next = memory.data();
    for (const TensorSpec& tensor : unit.tensors) {
      tensors.push_back(next);
      next += align_up(tensor.element_count() * size_of(type), 256);
    }
    return memory;
  };
  std::vector<DeviceBuffer> memory;
  std::vector<std::vector<std::byte*>> parameters(3);  // embedding, any block, head
  std::vector<std::vector<std::byte*>> gradients(3);
  const auto kind_of = [&](UnitId unit) {
    const std::uint32_t i = index_of(unit);
    return i == 0 ? 0u : i <= config.model.layers ? 1u : 2u;
  };
  for (const std::uint32_t unit : {0u, 1u, config.model.layers + 1}) {
    const std::uint32_t kind = kind_of(UnitId{unit});
    memory.push_back(unit_memory(spec.units[unit], ops.type(), parameters[kind]));
    fill_parameters(device, memory.back().data(), memory.back().size_bytes() / size_of(ops.type()),
                    ops.type());
    memory.push_back(unit_memory(spec.units[unit], ops.gradient_type(), gradients[kind]));
  }
  const auto constant = [&](UnitId unit) {
    const auto& tensors = parameters[kind_of(unit)];
    return std::vector<const std::byte*>(tensors.begin(), tensors.end());
  };
  std::vector<double> times;
  for (unsigned step = 0; step <= steps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    for (std::uint32_t micro_batch = 0; micro_batch < config.micro_batches; ++micro_batch) {
      const TokenBatch batch = dataset.training_batch(step, micro_batch);
      gpt.start_training(batch.tokens, batch.targets, stream.id());
      for (std::uint32_t use = 0; use < gpt.use_count(); ++use)
        gpt.forward(use, constant(spec.forward_order[use]), stream.id());
      for (std::uint32_t use = 0; use < gpt.use_count(); ++use)
        gpt.backward(use, constant(spec.backward_order[use]),
                     gradients[kind_of(spec.backward_order[use])], stream.id());
    }
    device.synchronize(stream.id());
    if (step != 0) times.push_back(seconds_since(begin));
  }
  return gpu_spread(times).median;
}

struct GpuStepLimits {
  double t_min_s = 0;
  double t_bound_s = 0;
};

// The limits of a step whose passes take `compute_s` alone: a third for the forward pass, each use
// the same.
GpuStepLimits limits_of(const TrainConfig& config, const Engine& engine, double compute_s,
                        Rates rates) {
  const ModelSpec model = validated(gpt::gpt_model_spec(config.model));
  const Schedule schedule = training_schedule(model, config.micro_batches);
  const double use_s = compute_s / static_cast<double>(3 * schedule.size() / 2);
  rates.units.assign(model.units.size(), {.forward_s = use_s, .backward_s = 2 * use_s});
  const PlannedStep step({.model = model, .micro_batches = config.micro_batches}, layout_of(engine),
                         placement_of(engine), /*commit_every=*/1);
  const StepShape shape = step.shape(rates);
  const auto bound_s = [&](OverlapPolicy policy) { return bound_step(shape, policy).step_s; };
  const bool may_be_eager = config.engine.optimizer.clip_norm == 0 &&
                            config.engine.optimizer.non_finite == NonFinitePolicy::kStop;
  return {.t_min_s = minimum_step(shape).step_s,
          .t_bound_s = may_be_eager ? bound_s(OverlapPolicy::kEager)
                                    : std::min(bound_s(OverlapPolicy::kDeferred),
                                               bound_s(OverlapPolicy::kSpeculative))};
}

constexpr std::uint64_t kDriveRequestBytes = 4_MiB;
constexpr std::uint32_t kDriveDepth = 16;

}  // namespace

DriveMeasurement measure_drive(const std::string& path, std::uint64_t file_bytes, Rates& rates) {
  IoBench drive({.paths = {path},
                 .file_bytes = file_bytes,
                 .request_bytes_max = kDriveRequestBytes,
                 .depth_max = kDriveDepth},
                [](std::span<std::byte> memory, std::span<const int> files) {
                  std::string note;
                  return open_io_queue({}, {.memory = memory, .files = files}, note);
                });
  const auto rate = [&](IoPattern pattern) {
    const IoMeasurement measured = drive.measure(
        {.pattern = pattern, .request_bytes = kDriveRequestBytes, .depth = kDriveDepth});
    return static_cast<double>(measured.bytes) / measured.seconds;
  };
  const double read = rate(IoPattern::kRead);
  const double write = rate(IoPattern::kWrite);
  const DriveMeasurement measured{
      .read = read,
      .write = write,
      .interference = 2 / rate(IoPattern::kMixed) / (1 / read + 1 / write)};
  set_storage_rates(read, write, measured.interference, rates);
  return measured;
}

TrainingBench bench_training(const TrainConfig& config, Device& device, gpt::DeviceOps& ops,
                             unsigned steps, Rates rates) {
  const Dataset dataset(config);
  gpt::DeviceGpt gpt(config.model, {.batch = config.sequences, .sequence = config.model.context},
                     device, ops);
  TrainingBench result;
  result.activation_bytes = gpt.activation_bytes();
  result.compute_step_s = compute_step_s(config, dataset, device, ops, gpt, steps);
  Engine engine(config.engine, gpt::gpt_model_spec(config.model), device);
  engine.initialize([](const TensorPlace&, std::uint64_t first, std::span<float> values) {
    fill_cheaply(first, values);
  });
  GpuTrainer trainer(config, dataset, engine, device, gpt);
  // The first step fills buffers that later ones find full. The last one's update ends after it, so
  // every counted step pays for one update.
  (void)trainer.train_step(0);
  std::vector<double> times;
  std::vector<double> stalls;
  PhaseMarks marks;
  for (unsigned step = 1; step <= steps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    const TrainedStep trained = trainer.train_step(step);
    times.push_back(seconds_since(begin));
    raise_marks(marks, trained.report.buffers);
    stalls.push_back(static_cast<double>(trained.report.stall_ns) * 1e-9);
  }
  engine.drain();
  result.step_s = gpu_spread(times);
  result.stall_s = gpu_spread(stalls).median;
  result.tokens_per_s = static_cast<double>(std::uint64_t{config.sequences} * config.micro_batches *
                                            config.model.context) /
                        result.step_s.median;
  result.percent_of_compute = 100 * result.compute_step_s / result.step_s.median;
  result.device_pool_bytes = placement_of(engine).device_bytes();
  result.host_pool_bytes = placement_of(engine).host_bytes();
  result.nvme_bytes = placement_of(engine).nvme_bytes();
  for (std::size_t phase = 0; phase < kStepPhases; ++phase)
    result.device_most_bytes[phase] = marks[phase].most(Tier::kDevice);
  const GpuStepLimits limits = limits_of(config, engine, result.compute_step_s, std::move(rates));
  result.t_min_s = limits.t_min_s;
  result.percent_of_t_min = 100 * result.t_min_s / result.step_s.median;
  result.t_bound_s = limits.t_bound_s;
  result.percent_of_t_bound = 100 * result.t_bound_s / result.step_s.median;
  return result;
}

}  // namespace sluice
