#include "tools/bench/step_bench.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <system_error>

#include <fmt/format.h>

#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "cpu_optim/cpu_optimizer.h"
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/planner/run_plan.h"
#include "engine/store/store_survey.h"
#include "gpu/cuda/device_math_choice.h"
#include "tools/bench/bench_adam.h"
#include "tools/bench/gpu_bench.h"
#include "tools/cli/print.h"

namespace sluice {
namespace {

// Gradients of two units.
constexpr std::uint64_t kGradientSlots = 2;
constexpr std::uint32_t kSaveBuffers = 2;
// Blocks that the device updates, as many as the plan wants.
constexpr std::uint64_t kStreamedSlots = 4;
// Experts on the device.
constexpr std::uint64_t kExpertPlaces = 3;

std::string name_of(const StepBenchModel& bench) {
  return fmt::format("sluice-bench-{}-{}", ::getpid(), bench.number);
}

// The adapters stand first, so that their homes come first. Each is used behind its unit.
ModelSpec model_with_adapters(const StepBenchModel& bench) {
  ModelSpec model;
  const std::uint64_t adapter = div_ceil(bench.parameters, bench.units * (kAdapterShare + 1));
  const auto add = [&](const char* kind, std::uint32_t number, std::uint64_t elements) {
    const std::string name = fmt::format("{}.{}", kind, number);
    model.units.push_back({.name = name,
                           .tensors = {{.name = name + ".weight", .shape = {elements}}},
                           .is_frozen = elements != adapter});
  };
  for (std::uint32_t i = 0; i < bench.units; ++i) add("adapter", i, adapter);
  for (std::uint32_t i = 0; i < bench.units; ++i) add("unit", i, adapter * kAdapterShare);
  for (std::uint32_t i = 0; i < bench.units; ++i) {
    model.forward_order.push_back(UnitId{bench.units + i});
    model.forward_order.push_back(UnitId{i});
  }
  return validated(model);
}

ModelSpec model_of(const StepBenchModel& bench) {
  if (bench.has_adapters) return model_with_adapters(bench);
  ModelSpec model;
  for (std::uint32_t i = 0; i < bench.unit_count(); ++i)
    model.units.push_back({.name = fmt::format("unit.{}", i),
                           .tensors = {{.name = fmt::format("unit.{}.weight", i),
                                        .shape = {div_ceil(bench.parameters, bench.unit_count())}}},
                           .is_announced = i >= bench.units});
  return validated(model);
}

// All state of the adapters is in memory, and the frozen units are on storage: the device has room
// for the adapters beside the window, and the host for their records and for the buffers.
void place_adapters(const ModelSpec& model, const Layout& layout, Config& config) {
  for (const UnitPlace& unit : layout.units())
    if (!unit.is_frozen)
      *config.memory.device_bytes +=
          align_up(layout.unit_parameter_bytes(unit.id), kStorageAlignBytes);
  config.placement.optimizer = TierChoice::kHost;
  config.memory.host_bytes = UINT64_MAX;
  config.memory.host_bytes = plan_run(config, model, layout, {}).placement.host_bytes();
  config.placement.parameters = TierChoice::kAuto;
  // With homes on the device, the adapters need fewer buffers. The rest is no home for others.
  const Placement wider = plan_run(config, model, layout, {}).placement;
  *config.memory.host_bytes = wider.host_bytes() - wider.host_parameter_bytes;
}

Config config_of(const StepBenchModel& bench, const ModelSpec& model, OverlapPolicy policy) {
  Config config;
  config.optimizer.overlap = policy;
  // Eager has to do without clipping; for the others it is on, and never changes an update.
  config.optimizer.clip_norm = policy == OverlapPolicy::kEager ? 0 : 1e30;
  config.storage.paths = {bench.path};
  if (bench.commit_every != 0)
    config.storage.state = {.name = name_of(bench), .commit_every = bench.commit_every};
  const std::uint64_t unit_bytes =
      align_up(model.units.back().tensors.front().element_count(), kAlignElements) * 2;
  const std::uint64_t window_units = bench.window_holds_all ? bench.units : bench.window_units;
  const std::uint64_t expert_places = bench.experts == 0 ? 0 : kExpertPlaces;
  if (bench.experts != 0) config.optimizer.untouched = UntouchedPolicy::kSkip;
  const Layout layout = plan_layout(config, model);
  const auto tenth = static_cast<std::uint32_t>(layout.blocks().size() / 10);
  config.optimizer.lanes = bench.lanes.value_or(std::max(3u, tenth));
  config.memory.device_bytes =
      (window_units + expert_places + kGradientSlots) * align_up(unit_bytes, kStorageAlignBytes);
  if (bench.streams) {
    config.optimizer.update_on = UpdateProcessor::kDevice;
    *config.memory.device_bytes += kStreamedSlots * update_slot(layout).size_bytes;
  }
  config.threads = bench.threads;
  config.memory.save_buffers = bench.save_every == 0 ? 0 : kSaveBuffers;
  config.placement.parameters = config.placement.optimizer = TierChoice::kNvme;
  if (bench.has_adapters) {
    place_adapters(model, layout, config);
    return config;
  }
  if (bench.memory_share == 0) return config;
  config.placement.parameters = config.placement.optimizer = TierChoice::kHost;
  if (bench.memory_share == 1) return config;
  // The memory that the engine needs with everything on storage, and the share on top of it.
  Config bare = config;
  bare.placement.parameters = bare.placement.optimizer = TierChoice::kNvme;
  bare.memory.host_bytes = UINT64_MAX;
  config.memory.host_bytes =
      plan_run(bare, model, layout, {}).placement.host_bytes() +
      static_cast<std::uint64_t>(bench.memory_share * static_cast<double>(layout.state_bytes()));
  config.placement.parameters = config.placement.optimizer = TierChoice::kAuto;
  return config;
}

// Some value in [-0.02, 0.02] for each element.
float initial_value(std::uint64_t tensor, std::uint64_t element) {
  const std::uint64_t mixed = (tensor << 40 ^ element) * 0x9e3779b97f4a7c15u;
  return (static_cast<float>(mixed >> 40) * 0x1p-23f - 1) * 0.02f;
}

// Bytes a second that the worker went through between the two.
double counted_rate(const TraceCounts& before, const TraceCounts& after, TraceKind kind) {
  const auto index = static_cast<std::size_t>(kind);
  const std::uint64_t busy_ns = after[index].busy_ns - before[index].busy_ns;
  const std::uint64_t size_bytes = after[index].size_bytes - before[index].size_bytes;
  return busy_ns == 0 ? 0 : static_cast<double>(size_bytes) * 1e9 / static_cast<double>(busy_ns);
}

std::uint64_t as_ns(double seconds) {
  return static_cast<std::uint64_t>(std::llround(seconds * 1e9));
}

}  // namespace

ModelSpec equal_units(std::uint64_t parameters, std::uint32_t units) {
  ModelSpec model;
  for (std::uint32_t i = 0; i < units; ++i)
    model.units.push_back({.name = fmt::format("unit.{}", i),
                           .tensors = {{.name = fmt::format("unit.{}.weight", i),
                                        .shape = {div_ceil(parameters, units)}}}});
  return validated(model);
}

StepBench::StepBench(const StepBenchModel& bench, OverlapPolicy policy, const Rates& rates)
    : bench_(bench), policy_(policy), rates_(rates), model_(model_of(bench)) {
  const Config config = config_of(bench, model_, policy);
  storage_ = config.storage;
  SLUICE_CHECK(rates.up_bytes_per_second == rates.down_bytes_per_second,
               "the host device's bus has one rate");
  device_ = make_host_device(
      {.memory_bytes = *config.memory.device_bytes,
       .copy_bytes_per_second = static_cast<std::uint64_t>(rates.up_bytes_per_second)});
  const ThrottleOptions throttle{
      .read_bytes_per_second = static_cast<std::uint64_t>(rates.read_bytes_per_second),
      .write_bytes_per_second = static_cast<std::uint64_t>(rates.write_bytes_per_second),
      .duplex = rates.duplex,
      .latency_ns = as_ns(rates.latency_s),
      .flush_ns = as_ns(bench.flush_s),
      .write_cache_bytes = bench.write_cache_bytes};
  checkpoints_ = fmt::format("{}/{}.checkpoints", bench.path, name_of(bench));
  save_every_ = bench.save_every;
  engine_.reset(new Engine(
      EngineOverQueue::make(config, model_, *device_, [&](std::unique_ptr<IoQueue> drive) {
        auto throttled = make_throttled_queue(std::move(drive), throttle);
        throttle_ = throttled.get();
        return throttled;
      })));
  engine_->initialize([](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    for (std::uint64_t i = 0; i < values.size(); ++i)
      values[i] = initial_value(index_of(tensor.id), first + i);
  });
  stream_ = Stream(*device_, "compute");
}

StepBench::~StepBench() {
  if (engine_ == nullptr) return;
  engine_.reset();
  std::error_code ignored;
  if (save_every_ != 0) std::filesystem::remove_all(checkpoints_, ignored);
  if (storage_.state.name.empty()) return;
  try {
    (void)remove_store(storage_.state.name, storage_.paths);
    for (const std::string& path : storage_.paths)
      (void)::unlink((path + "/" + storage_.state.name + ".lock").c_str());
  } catch (const Error& error) {
    warn("sluice: {}\n", error.what());
  }
}

std::vector<MeasuredStep> StepBench::run(unsigned warm, unsigned measured) {
  std::vector<MeasuredStep> steps;
  const TraceCounts before = trace_counts();
  std::uint64_t begin_ns = steady_now_ns();
  for (unsigned i = 0; i <= warm + measured; ++i) {
    const bool is_measured = i >= warm && i < warm + measured;
    // The rest of the last checkpoint belongs to the last measured step.
    if (!is_measured && save_every_ != 0) count(engine_->finish_save());
    const std::uint64_t now_ns = steady_now_ns();
    if (i > 0) steps.back().step_s = static_cast<double>(now_ns - begin_ns) * 1e-9;
    begin_ns = now_ns;
    if (is_measured) save_if_due(i - warm);
    steps.push_back({.report = step()});
    const StepReport& report = steps.back().report;
    const Traffic traffic = engine_->predicted_traffic(1);
    steps.back().wanted_read_bytes =
        traffic.nvme_read_bytes + report.announced_read_bytes + report.announced_update_bytes;
    steps.back().wanted_write_bytes = traffic.nvme_write_bytes + report.announced_update_bytes;
  }
  engine_->drain();
  const StateFormat& format = layout_of(*engine_).format();
  const double state_bytes = format.state_bytes_per_element();
  const TraceCounts after = trace_counts();
  cpu_rates_ = {.adam = counted_rate(before, after, TraceKind::kAdam) / state_bytes,
                .norm = counted_rate(before, after, TraceKind::kNorm) /
                        static_cast<double>(format.gradient_bytes())};
  return {steps.begin() + warm, steps.end() - 1};
}

void StepBench::save_if_due(unsigned step) {
  if (save_every_ == 0) return;
  count(engine_->poll_save());
  if (step % save_every_ != 0) return;
  count(engine_->finish_save());
  engine_->begin_save(checkpoints_, {.keep = 1});
}

void StepBench::count(const std::optional<SavedCheckpoint>& saved) {
  if (!saved) return;
  const auto seconds = [](std::int64_t time_ns) { return static_cast<double>(time_ns) * 1e-9; };
  ++saves_.count;
  saves_.duration_s += seconds(saved->duration_ns);
  saves_.blocked_s += seconds(saved->blocked_ns);
  saves_.update_wait_s += seconds(saved->update_wait_ns);
}

// Experts that the step uses behind `unit`. They begin at a place of their own in each step.
std::vector<UnitId> StepBench::experts_of(std::uint32_t unit, std::uint64_t step) const {
  std::vector<UnitId> units;
  if (unit >= bench_.routers()) return units;
  const auto begin =
      static_cast<std::uint32_t>((step * 31 + unit * 17) * 0x9e3779b97f4a7c15u >> 40);
  for (std::uint32_t i = 0; i < bench_.active_experts; ++i)
    units.push_back(UnitId{bench_.units + unit * bench_.experts + (begin + i) % bench_.experts});
  return units;
}

void StepBench::use(Step& step, UnitId unit, Pass pass) {
  const Lease lease = step.acquire(unit, pass, stream_);
  const UnitTime& time = rates_.units[index_of(unit)];
  device_->occupy(stream_.id(), as_ns(pass == Pass::kForward ? time.forward_s : time.backward_s));
}

// Each unit's router speaks at the end of its forward, and so for backward once forward is over.
// The rows of a table are known at once.
StepReport StepBench::step() {
  Step step = engine_->begin_step({.learning_rate = 1e-3});
  const auto active_of = [&](UnitId unit) {
    return bench_.active_experts == 0 ? std::vector<UnitId>()
                                      : experts_of(index_of(unit), step.number());
  };
  const auto announce = [&](UnitId unit, Pass pass) {
    const std::vector<UnitId> units = active_of(unit);
    if (!units.empty()) step.announce(units, pass);
  };
  if (bench_.has_table) announce(model_.forward_order.front(), Pass::kForward);
  for (const UnitId unit : model_.forward_order) {
    use(step, unit, Pass::kForward);
    if (!bench_.has_table) announce(unit, Pass::kForward);
    for (const UnitId expert : active_of(unit)) use(step, expert, Pass::kForward);
  }
  for (const UnitId unit : model_.backward_order) announce(unit, Pass::kBackward);
  for (const UnitId unit : model_.backward_order) {
    for (const UnitId expert : active_of(unit)) use(step, expert, Pass::kBackward);
    use(step, unit, Pass::kBackward);
  }
  return step.finish();
}

std::uint64_t StepBench::frozen_parameters() const {
  std::uint64_t parameters = 0;
  for (const UnitSpec& unit : model_.units)
    if (unit.is_frozen) parameters += unit.tensors.front().element_count();
  return parameters;
}

PlannedStep StepBench::planned() const {
  std::vector<PlannedAnnouncement> announcements;
  const std::uint32_t routers = bench_.active_experts == 0 ? 0 : bench_.routers();
  for (std::uint32_t unit = 0; unit < routers; ++unit)
    announcements.push_back({.before_use = unit + 1,
                             .announced_before = bench_.has_table ? 0 : unit + 1,
                             .pass = Pass::kForward,
                             .units = experts_of(unit, 0)});
  for (std::uint32_t unit = routers; unit-- > 0;)
    announcements.push_back({.before_use = 2 * bench_.units - 1 - unit,
                             .announced_before = bench_.units,
                             .pass = Pass::kBackward,
                             .units = experts_of(unit, 0)});
  return {{.model = model_},
          layout_of(*engine_),
          placement_of(*engine_),
          storage_.state.commit_every,
          announcements};
}

StepCost StepBench::bound(const Rates& rates) const {
  return bound_step(planned().shape(rates), policy_);
}

StepCost StepBench::minimum(const Rates& rates) const {
  return minimum_step(planned().shape(rates));
}

double ideal_storage_s(const Rates& rates, std::uint64_t parameters) {
  const auto count = static_cast<double>(parameters);
  const double read_s = 14 * count / rates.read_bytes_per_second;
  const double write_s = 12 * count / rates.write_bytes_per_second;
  return rates.duplex == Duplex::kHalf ? read_s + write_s : std::max(read_s, write_s);
}

CpuRates measure_cpu_rates(std::uint64_t parameters, unsigned threads) {
  const BenchCase& split = kBenchCases[1];
  const BenchResult update = bench_adam(
      split, {.parameters = parameters, .threads = threads, .rounds = 3}, [](unsigned) {});
  CpuOptimizer optimizer(threads);
  const std::vector<std::uint16_t> gradient(parameters, 0x3c00);
  std::vector<double> rates;
  for (int round = 0; round < 3; ++round) {
    NormAccumulator norm;
    const std::uint64_t begin_ns = steady_now_ns();
    optimizer.add_squared_norm(DType::kBf16, gradient.data(), parameters, norm);
    rates.push_back(static_cast<double>(parameters) * 1e9 /
                    static_cast<double>(steady_now_ns() - begin_ns));
  }
  std::ranges::sort(rates);
  return {.adam = update.parameters_per_s.median, .norm = rates[1]};
}

double measure_device_update(std::uint64_t parameters) {
  constexpr unsigned kRounds = 5;
  const auto device =
      make_host_device({.memory_bytes = 64 * parameters, .copy_bytes_per_second = 0});
  const std::unique_ptr<DeviceMath> math = make_device_math(*device);
  return bench_adam_kernel(*device, *math, parameters, kRounds).parameters_per_s();
}

}  // namespace sluice
