// The cost of small and odd shapes: many units of few parameters, blocks of 4,096 elements, one
// lane. Next to nothing is computed, so a step is what the engine costs for each use and block,
// with real files. Engines of all policies take turns. Prints, for each policy, the time of
// construction, the time of a step and of a use, its processor time and context switches per use,
// and the step's ratio to that of the serial engine in the same round. It is a benchmark, not a
// test: it asserts nothing.
//
//   small_units [DIRECTORY [ROUNDS]]     default: /var/tmp 20
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/plan.h>
#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"

namespace sluice {
namespace {

constexpr int kWarmSteps = 2;
constexpr int kStepsOfTurn = 4;

struct Shape {
  std::string name;
  std::uint64_t units = 0;
  std::uint64_t unit_elements = 0;
  std::uint64_t host_bytes = 0;
  TierChoice home = TierChoice::kNvme;
};

struct Use {
  double wall_ns = 0;
  double cpu_ns = 0;
  double switches = 0;
};

Use now() {
  rusage usage{};
  (void)::getrusage(RUSAGE_SELF, &usage);
  const auto ns = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) * 1e9 + static_cast<double>(time.tv_usec) * 1e3;
  };
  return {.wall_ns = static_cast<double>(steady_now_ns()),
          .cpu_ns = ns(usage.ru_utime) + ns(usage.ru_stime),
          .switches = static_cast<double>(usage.ru_nvcsw + usage.ru_nivcsw)};
}

struct Spread {
  double median = 0, low = 0, high = 0;
};

Spread spread_of(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t last = values.size() - 1;
  return {values[values.size() / 2], values[last / 10], values[last - last / 10]};
}

class Side {
 public:
  Side(const Shape& shape, OverlapPolicy policy, const std::string& directory) : policy_(policy) {
    Config config;
    config.storage.paths = {directory};
    config.storage.block_elements = 4096;
    config.placement = {shape.home, shape.home};
    config.memory.device_bytes = 64_MiB;
    config.memory.host_bytes = shape.host_bytes;
    config.optimizer.overlap = policy;
    config.optimizer.clip_norm = 0;
    config.threads = 2;
    ModelSpec model;
    for (std::uint64_t unit = 0; unit < shape.units; ++unit)
      model.units.push_back(
          {.name = fmt::format("u{}", unit),
           .tensors = {{.name = fmt::format("w{}", unit), .shape = {shape.unit_elements}}}});
    model_ = validated(model);
    device_ = make_host_device({.memory_bytes = 64_MiB});
    const std::uint64_t begin_ns = steady_now_ns();
    engine_ = std::make_unique<Engine>(config, model_, *device_);
    construction_s_ = static_cast<double>(steady_now_ns() - begin_ns) * 1e-9;
    engine_->initialize([](const TensorPlace&, std::uint64_t, std::span<float> values) {
      std::ranges::fill(values, 0.5f);
    });
    stream_ = Stream(*device_, "compute");
    for (int step = 0; step < kWarmSteps; ++step) train();
    engine_->drain();
  }

  // The time ends with the last step's update.
  void turn() {
    const Use before = now();
    for (int step = 0; step < kStepsOfTurn; ++step) train();
    engine_->drain();
    const Use after = now();
    step_ns.push_back((after.wall_ns - before.wall_ns) / kStepsOfTurn);
    cpu_ns.push_back((after.cpu_ns - before.cpu_ns) / kStepsOfTurn / uses());
    switches.push_back((after.switches - before.switches) / kStepsOfTurn / uses());
  }

  void print(const Shape& shape, const Side& serial) const {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < step_ns.size(); ++i)
      ratios.push_back(step_ns[i] / serial.step_ns[i]);
    const Spread step = spread_of(step_ns);
    const Spread ratio = spread_of(ratios);
    fmt::print(
        "| {} | {} | {} | {:.3f} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.2f} [{:.2f}, {:.2f}] |\n",
        shape.name, name_of(policy_), placement_of(*engine_).lanes.count, construction_s_,
        step.median / 1e6, step.median / uses() / 1e3, spread_of(cpu_ns).median / 1e3,
        spread_of(switches).median, ratio.median, ratio.low, ratio.high);
  }

  std::vector<double> step_ns, cpu_ns, switches;

 private:
  void train() {
    Step step = engine_->begin_step({.learning_rate = 1e-3});
    for (const UnitId unit : model_.forward_order)
      (void)step.acquire(unit, Pass::kForward, stream_);
    for (const UnitId unit : model_.backward_order)
      (void)step.acquire(unit, Pass::kBackward, stream_);
    (void)step.finish();
  }
  double uses() const {
    return static_cast<double>(model_.forward_order.size() + model_.backward_order.size());
  }

  OverlapPolicy policy_;
  ModelSpec model_;
  double construction_s_ = 0;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Engine> engine_;
  Stream stream_;
};

void measure(const Shape& shape, const std::string& directory, int rounds) {
  std::vector<std::unique_ptr<Side>> sides;
  for (const OverlapPolicy policy : {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                     OverlapPolicy::kEager, OverlapPolicy::kSpeculative})
    sides.push_back(std::make_unique<Side>(shape, policy, directory));
  for (int round = 0; round < rounds; ++round)
    for (std::size_t i = 0; i < sides.size(); ++i)
      sides[(i + static_cast<std::size_t>(round)) % sides.size()]->turn();
  for (const std::unique_ptr<Side>& side : sides) side->print(shape, *sides.front());
}

}  // namespace
}  // namespace sluice

int main(int count, char** words) {
  using namespace sluice;
  const std::string directory = count > 1 ? words[1] : "/var/tmp";
  const int rounds = count > 2 ? std::atoi(words[2]) : 20;
  fmt::print(
      "| shape | policy | lanes | construction s | step ms | us a use | CPU us a use | switches a "
      "use | of serial |\n"
      "|---|---|---|---|---|---|---|---|---|\n");
  const Shape shapes[] = {
      {"1,000 units of 30, on storage", 1000, 30, 64_MiB},
      {"1,000 units of 30, on storage, little memory", 1000, 30, 2_MiB},
      {"1,000 units of 30, in memory", 1000, 30, 64_MiB, TierChoice::kHost},
      {"16,000 units of 30, in memory", 16000, 30, 512_MiB, TierChoice::kHost},
      {"8 units of 32 blocks of 4,096, on storage, little memory", 8, 32 * 4096, 3_MiB},
  };
  for (const Shape& shape : shapes) measure(shape, directory, rounds);
}
