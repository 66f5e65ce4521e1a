// The engine against the ideal schedule of its policy: the order in which it reads, updates and
// writes, and how much it reads, as schedule_oracle.cc says, which is held to the bound's
// simulation to the tick. A throttled drive, emulated computation and paced updates are slow enough
// to determine the order; where something else on the machine has been slower still, the run is
// repeated.
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <thread>

#include <fmt/format.h>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/bound/bound.h"
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/run/task_thread.h"
#include "io/throttled_queue.h"
#include "tests/engine/bound/bound_model.h"
#include "tests/engine/bound/schedule_oracle.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// Units of one block each. With more, fetches in a row would pass a waiting record read over so
// often that the drive takes that up first, which the ideal schedule leaves out.
constexpr std::uint32_t kUnits = 6;
constexpr int kSteps = 4;  // that are compared; another one follows
constexpr int kAttempts = 20;
constexpr long kTicksPerSecond = 1'000'000;

// The worker takes so long for each of its tasks, however little they are.
constexpr std::chrono::microseconds kPace{1000};
void pace_worker() {
  char name[16] = {};
  (void)::pthread_getname_np(::pthread_self(), name, sizeof name);
  if (std::string_view(name) == "sluice-work") std::this_thread::sleep_for(kPace);
}

// The settings of a run.
struct Conditions {
  std::string name;
  OverlapPolicy policy = OverlapPolicy::kSerial;
  long read_parameters = 0, write_parameters = 0;  // ticks a block; five times that its record
  long forward = 0, backward = 0;                  // a unit
  std::uint32_t lanes = 3;
  // All reads come in one order. Early updates of the engine's start behind the fetch for backward,
  // those of the ideal schedule as soon as there is a lane, so theirs do not: the reads of records
  // do, and as much is read.
  bool reads_in_one_order = true;
};

void PrintTo(const Conditions& value, std::ostream* out) {
  *out << value.name;
}

double seconds(long ticks) {
  return static_cast<double>(ticks) / kTicksPerSecond;
}

struct Observed {
  std::vector<OracleEvent> events;
  std::vector<std::uint64_t> read_bytes;  // by step
};

class SimulatedOrder : public testing::TestWithParam<Conditions> {
 protected:
  SimulatedOrder() {
    model_ = validated(BoundModel::spec_of(std::vector<int>(kUnits, 1)));
    config_.storage.paths = {directory_.path()};
    config_.storage.block_elements = kBlockElements;
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config_.optimizer.overlap = GetParam().policy;
    // Eager has to do without; for the others it is on, and never bites.
    config_.optimizer.clip_norm = GetParam().policy == OverlapPolicy::kEager ? 0 : 1e30;
    config_.optimizer.lanes = GetParam().lanes;
    config_.memory = {.device_bytes = 5 * kParameterBytes, .host_bytes = 16_MiB};
    config_.threads = 1;
    const auto rate = [](long ticks) { return kParameterBytes / seconds(ticks); };
    rates_.read_bytes_per_second = rate(GetParam().read_parameters);
    rates_.write_bytes_per_second = rate(GetParam().write_parameters);
    rates_.duplex = Duplex::kFull;
    rates_.adam_parameters_per_second = rates_.norm_parameters_per_second =
        kBlockElements / std::chrono::duration<double>(kPace).count();
    rates_.units.assign(kUnits, {.forward_s = seconds(GetParam().forward),
                                 .backward_s = seconds(GetParam().backward)});
  }

  void occupy(HostDevice& device, const Stream& stream, long ticks) {
    device.occupy(stream.id(), static_cast<std::uint64_t>(ticks) * 1000);
  }

  Observed run() {
    const auto device = make_host_device({.memory_bytes = *config_.memory.device_bytes});
    const ThrottleOptions throttle{
        .read_bytes_per_second = static_cast<std::uint64_t>(rates_.read_bytes_per_second),
        .write_bytes_per_second = static_cast<std::uint64_t>(rates_.write_bytes_per_second),
        .duplex = rates_.duplex};
    Engine engine =
        EngineOverQueue::make(config_, model_, *device, [&](std::unique_ptr<IoQueue> drive) {
          return make_throttled_queue(std::move(drive), throttle);
        });
    engine.initialize([](const TensorPlace&, std::uint64_t, std::span<float> values) {
      std::ranges::fill(values, 1.0f);
    });
    placement_ = placement_of(engine);
    const Stream stream(*device, "compute");
    TaskThread::set_before_task(&pace_worker);
    trace_enable(1 << 14);
    Observed result;
    for (int i = 0; i <= kSteps; ++i) {
      Step step = engine.begin_step({.learning_rate = 1e-3});
      for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
        const bool is_forward = pass == Pass::kForward;
        for (const UnitId unit : is_forward ? model_.forward_order : model_.backward_order) {
          const Lease lease = step.acquire(unit, pass, stream);
          occupy(*device, stream, is_forward ? GetParam().forward : GetParam().backward);
        }
      }
      (void)step.finish();
    }
    engine.drain();
    result.read_bytes.assign(kSteps, 0);
    std::vector<TraceRecord> records = trace_take();
    std::ranges::stable_sort(records, {}, &TraceRecord::started_ns);
    for (const TraceRecord& record : records) note(record, result);
    trace_enable(0);
    TaskThread::set_before_task(nullptr);
    return result;
  }

  void note(const TraceRecord& record, Observed& run) {
    const bool is_record = record.detail == kTraceOptimizerState;
    OracleWork work = OracleWork::kNone;
    if (record.kind == TraceKind::kRead)
      work = is_record ? OracleWork::kReadRecord : OracleWork::kReadParameters;
    if (record.kind == TraceKind::kWrite)
      work = is_record ? OracleWork::kWriteRecord : OracleWork::kWriteParameters;
    if (record.kind == TraceKind::kAdam) work = OracleWork::kAdam;
    const int step = static_cast<int>(record.step) - 1;
    if (work == OracleWork::kNone || step >= kSteps) return;
    if (record.kind == TraceKind::kRead)
      run.read_bytes[static_cast<std::size_t>(step)] += record.size_bytes;
    run.events.push_back({work, step, static_cast<int>(record.block)});
  }

  WindowPlan window() const {
    const Layout layout(model_, state_format(config_), kBlockElements);
    return plan_window(training_schedule(model_, 1), window_unit_bytes(layout, placement_),
                       placement_.window_bytes, 1);
  }

  OracleCase oracle_case() const {
    OracleCase given;
    given.policy = GetParam().policy;
    given.unit_blocks.assign(kUnits, 1);
    given.forward.assign(kUnits, GetParam().forward);
    given.backward.assign(kUnits, GetParam().backward);
    given.parameters_in_ram.assign(kUnits, false);
    given.record_in_ram.assign(kUnits, false);
    given.gradients_on_storage.assign(kUnits, false);
    given.on_device.assign(kUnits, false);
    given.leased_at_home.assign(kUnits, false);
    given.gradients_in_set = placement_.leases_gradient_set;
    const Schedule schedule = training_schedule(model_, 1);
    const WindowPlan plan = window();
    for (std::size_t use = 0; use < schedule.size(); ++use) {
      const WindowUse& place = plan.uses[use];
      given.uses.push_back(
          {.unit = static_cast<int>(index_of(schedule[use].unit)),
           .is_backward = schedule[use].pass == Pass::kBackward,
           .fetches = place.fetch,
           .evicted_uses = {place.evicted_uses.begin(), place.evicted_uses.end()}});
    }
    given.read_parameters = GetParam().read_parameters;
    given.write_parameters = GetParam().write_parameters;
    given.read_record = 5 * given.read_parameters;
    given.write_record = 5 * given.write_parameters;
    given.adam = given.norm = kPace.count();
    given.lanes = static_cast<int>(placement_.lanes.count);
    given.slots = static_cast<int>(placement_.parameter_slots.count);
    given.kept_slots = static_cast<int>(placement_.kept_slots);
    given.gradient_slots = static_cast<int>(placement_.gradient_slots.count);
    return given;
  }

  StepCost bound() const {
    const Layout layout(model_, state_format(config_), kBlockElements);
    const Schedule schedule = training_schedule(model_, 1);
    const WindowPlan plan = window();
    return bound_step({layout, placement_, schedule, plan, rates_}, GetParam().policy);
  }

  TempDirectory directory_;
  ModelSpec model_;
  Config config_;
  Rates rates_;
  Placement placement_;
};

bool is_read(const OracleEvent& event) {
  return event.work == OracleWork::kReadParameters || event.work == OracleWork::kReadRecord;
}
bool is_record_read(const OracleEvent& event) {
  return event.work == OracleWork::kReadRecord;
}
bool is_update(const OracleEvent& event) {
  return event.work == OracleWork::kAdam;
}
bool is_write(const OracleEvent& event) {
  return event.work == OracleWork::kWriteParameters || event.work == OracleWork::kWriteRecord;
}

// Those of one kind, in their order, in words.
std::string in_words(const std::vector<OracleEvent>& events, bool (*is_meant)(const OracleEvent&)) {
  std::string words;
  int step = -1;
  for (const OracleEvent& event : events) {
    if (!is_meant(event)) continue;
    if (event.step != step) words += "\n  step " + std::to_string(event.step + 1) + ":";
    step = event.step;
    const bool is_parameters =
        event.work == OracleWork::kReadParameters || event.work == OracleWork::kWriteParameters;
    words += (is_parameters      ? " parameters "
              : is_update(event) ? " update "
                                 : " record ") +
             std::to_string(event.block);
  }
  return words;
}

// The faults of a run.
std::string differences(const std::vector<OracleEvent>& actual,
                        const std::vector<OracleEvent>& expected, bool reads_in_one_order) {
  std::string text;
  const auto compare = [&](const char* what, bool (*is_meant)(const OracleEvent&)) {
    const std::string own = in_words(actual, is_meant);
    const std::string ideal = in_words(expected, is_meant);
    if (own != ideal) text += std::string(what) + own + "\nnot" + ideal + "\n";
  };
  if (reads_in_one_order) compare("reads come as", is_read);
  compare("reads of records come as", is_record_read);
  compare("updates come as", is_update);
  compare("writes come as", is_write);
  return text;
}

TEST_P(SimulatedOrder, IsThatOfReadsUpdatesAndWrites) {
  std::string wrong;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const Observed engine = run();
    const OracleCase given = oracle_case();
    const std::vector<long> begins = step_begins(given, 9);
    ASSERT_NEAR(bound().step_s, seconds(begins[7] - begins[3]) / 4, 1e-9);
    wrong = differences(engine.events, step_events(given, kSteps), GetParam().reads_in_one_order);
    // One block of parameters a lane: by when the update of a block began, it was read or kept.
    const std::uint64_t ideal_bytes = bound().traffic.nvme_read_bytes;
    for (std::size_t step = 1; step < kSteps; ++step) {
      const std::uint64_t bytes = engine.read_bytes[step];
      if (std::max(bytes, ideal_bytes) - std::min(bytes, ideal_bytes) >
          GetParam().lanes * kParameterBytes)
        wrong += fmt::format("step {} reads {} bytes, not {}\n", step + 1, bytes, ideal_bytes);
    }
    if (wrong.empty()) return;
  }
  ADD_FAILURE() << "in the last of " << kAttempts << " runs, and somehow in each,\n" << wrong;
}

INSTANTIATE_TEST_SUITE_P(
    All, SimulatedOrder,
    testing::Values(
        Conditions{"serial", OverlapPolicy::kSerial, 2000, 2000, 8000, 12000, 3, true},
        Conditions{"deferred_computing", OverlapPolicy::kDeferred, 2000, 2000, 11000, 17000, 3,
                   true},
        Conditions{"deferred_reading", OverlapPolicy::kDeferred, 2000, 2000, 5000, 8000, 3, true},
        Conditions{"eager_computing", OverlapPolicy::kEager, 2000, 2000, 11000, 17000, 1, false},
        Conditions{"speculative_computing", OverlapPolicy::kSpeculative, 2000, 2000, 11000, 17000,
                   1, false}),
    [](const auto& value) { return value.param.name; });

}  // namespace
}  // namespace sluice::test
