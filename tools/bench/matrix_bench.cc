#include "tools/bench/matrix_bench.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "cpu_optim/cpu_optimizer.h"
#include "engine/engine_over_queue.h"
#include "io/throttled_queue.h"
#include "tools/bench/step_bench.h"

namespace sluice {
namespace {

constexpr double kBusRate = 2e9;
constexpr double kLatencyOfDriveS = 100e-6;
constexpr double kAdamPace = 25e6;  // parameters a second
// Backward computes twice what forward does.
constexpr double kForwardPart = 1.0 / 3;
constexpr unsigned kLanes = 3;
constexpr unsigned kProbedSteps = 4;

// Budgets that hold every cell. Under "serial" the plan knows to the byte what is in use, but for
// buffers, whose use depends on a run's timing.
Config config_of_bench(const MatrixBenchModel& bench, const ModelSpec& model) {
  Config config;
  config.optimizer.overlap = OverlapPolicy::kSerial;
  config.optimizer.clip_norm = 1e30;
  config.optimizer.lanes = kLanes;
  config.storage.paths = {bench.path};
  config.storage.block_elements = kAlignElements * 64;
  config.threads = 1;
  config.sharding.keep_gathered_bytes = 0;
  config.memory.device_bytes = 24 * model.element_count() + 16_MiB;
  config.memory.host_bytes = 24 * model.element_count() + 16_MiB;
  return config;
}

Rates rates_of_bench(const MatrixBenchModel& bench) {
  Rates rates;
  rates.read_bytes_per_second = rates.write_bytes_per_second =
      static_cast<double>(bench.rate_bytes_per_second);
  rates.duplex = Duplex::kHalf;
  rates.latency_s = kLatencyOfDriveS;
  rates.up_bytes_per_second = rates.down_bytes_per_second = kBusRate;
  rates.adam_parameters_per_second = kAdamPace;
  const double unit_s = bench.compute_s / bench.units;
  rates.units.assign(
      bench.units, {.forward_s = kForwardPart * unit_s, .backward_s = (1 - kForwardPart) * unit_s});
  return rates;
}

std::uint64_t ns_of(double seconds) {
  return static_cast<std::uint64_t>(std::llround(seconds * 1e9));
}

double seconds_between(std::uint64_t begin_ns, std::uint64_t end_ns) {
  return static_cast<double>(end_ns - begin_ns) * 1e-9;
}

}  // namespace

MatrixBench::MatrixBench(const MatrixBenchModel& bench, RankWorld& world) {
  request_.model = equal_units(bench.parameters, bench.units);
  request_.config = config_of_bench(bench, request_.model);
  request_.machine.ranks = world.count();
  request_.rates = rates_of_bench(bench);
  request_.machine.device_bytes = *request_.config.memory.device_bytes;
  device_ = make_host_device({.memory_bytes = 2 * request_.machine.device_bytes,
                              .copy_bytes_per_second = static_cast<std::uint64_t>(kBusRate)});
  stream_ = Stream(*device_, "compute");
  CpuOptimizer::set_update_pace(static_cast<std::uint64_t>(kAdamPace));
  request_.rates.norm_parameters_per_second =
      measure_cpu_rates(bench.parameters, request_.config.threads).norm;
  request_.rates.device_adam_parameters_per_second = device_update_rate();
  ranks_ = world.join(*device_);
}

MatrixBench::~MatrixBench() {
  CpuOptimizer::set_update_pace(0);
}

// Measures steps in which only the update takes time, with the state on the device.
double MatrixBench::device_update_rate() {
  Config config = request_.config;
  config.placement.parameters = config.placement.optimizer = TierChoice::kDevice;
  const std::vector<UnitTime> units(request_.rates.units.size());
  const std::vector<UnitTime> own = std::exchange(request_.rates.units, units);
  const std::unique_ptr<Engine> engine = make_engine(config);
  std::vector<double> times_s;
  for (unsigned i = 0; i < kProbedSteps; ++i) {
    const std::uint64_t begin_ns = steady_now_ns();
    (void)step(*engine);
    engine->drain();
    times_s.push_back(seconds_between(begin_ns, steady_now_ns()));
  }
  request_.rates.units = own;
  return static_cast<double>(request_.model.element_count()) / std::ranges::min(times_s);
}

std::unique_ptr<Engine> MatrixBench::make_engine(const Config& config) {
  const Rates& rates = request_.rates;
  const ThrottleOptions throttle{
      .read_bytes_per_second = static_cast<std::uint64_t>(rates.read_bytes_per_second),
      .write_bytes_per_second = static_cast<std::uint64_t>(rates.write_bytes_per_second),
      .duplex = rates.duplex,
      .latency_ns = ns_of(rates.latency_s),
      .flush_ns = 0};
  std::unique_ptr<Engine> engine(new Engine(EngineOverQueue::make(
      config, request_.model, *device_,
      [&](std::unique_ptr<IoQueue> drive) {
        return make_throttled_queue(std::move(drive), throttle);
      },
      ranks_.get())));
  engine->initialize([](const TensorPlace&, std::uint64_t first, std::span<float> values) {
    for (std::uint64_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>((first + i) % 101) * 1e-3f;
  });
  return engine;
}

StepReport MatrixBench::step(Engine& engine) {
  Step step = engine.begin_step({.learning_rate = 1e-3});
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const auto& order =
        pass == Pass::kForward ? request_.model.forward_order : request_.model.backward_order;
    for (const UnitId unit : order) {
      const Lease lease = step.acquire(unit, pass, stream_);
      const UnitTime& time = request_.rates.units[index_of(unit)];
      device_->occupy(stream_.id(),
                      ns_of(pass == Pass::kForward ? time.forward_s : time.backward_s));
    }
  }
  return step.finish();
}

MeasuredRow MatrixBench::measure(const MatrixRow& row, unsigned warm, unsigned steps) {
  const std::unique_ptr<Engine> engine = make_engine(config_of_row(request_.config, row));
  MeasuredRow measured;
  for (unsigned i = 0; i < warm; ++i) (void)step(*engine);
  std::uint64_t begin_ns = steady_now_ns();
  for (unsigned i = 0; i < steps; ++i) {
    raise_marks(measured.most_in_use, step(*engine).buffers);
    const std::uint64_t end_ns = steady_now_ns();
    measured.step_s.push_back(seconds_between(begin_ns, end_ns));
    begin_ns = end_ns;
  }
  engine->drain();
  return measured;
}

}  // namespace sluice
