// The trace of a step while the step is under way: computation on a stream that is held up by hand,
// and waits with causes of their own.
#include "engine/run/step_timeline.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <thread>

#include <sluice/host_device.h>
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"
#include "tools/trace/trace_reader.h"

namespace sluice::test {
namespace {

constexpr StateFormat kFormat{
    .parameter = DType::kBf16, .gradient = DType::kBf16, .master = MasterLayout::kSplitBf16};

class StepUnderWay : public testing::Test {
 protected:
  StepUnderWay() {
    trace_start({.file = path_});
    timeline_.begin(schedule_, /*step=*/9);
  }
  ~StepUnderWay() override { (void)trace_stop(); }

  // Computation that lasts until its promise is kept.
  std::promise<void> compute() {
    std::promise<void> over;
    device_->launch(stream_.id(), [future = over.get_future().share()] { future.wait(); });
    return over;
  }
  void lease(std::uint32_t use) {
    timeline_.arrive(use, stream_.id());
    timeline_.resume(use, stream_.id(), {.scheduled = schedule_[use]});
  }
  // As it would be left by a kill once `done` holds of it.
  TraceFile killed(const auto& done) const {
    while (true) {
      const TraceFile file = read_trace(path_);
      if (done(file)) return file;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  static std::vector<TraceRecord> of_kind(const TraceFile& file, TraceKind kind) {
    std::vector<TraceRecord> records;
    for (const TraceRecord& record : file.records) {
      if (record.kind == kind) records.push_back(record);
    }
    return records;
  }

  const TempDirectory directory_;
  const std::string path_ = directory_.path() + "/step.trace";
  const ModelSpec model_ = validated(toy_model());
  const Layout layout_{model_, kFormat, 4096};
  const Schedule schedule_ = training_schedule(model_, 1);
  const std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 1 << 20});
  Stream stream_{*device_, "compute"};
  StepTimeline timeline_{layout_, *device_};
};

TEST_F(StepUnderWay, ComputationIsThereOnceItHasEndedAndBefore) {
  lease(0);
  std::promise<void> first = compute();
  lease(1);
  const TraceFile computing =
      killed([](const TraceFile& file) { return !of_kind(file, TraceKind::kCompute).empty(); });
  ASSERT_EQ(of_kind(computing, TraceKind::kCompute).size(), 1u);
  EXPECT_EQ(of_kind(computing, TraceKind::kCompute)[0].use, 0u);
  EXPECT_EQ(computing.open_step, 9u);

  std::promise<void> second = compute();
  first.set_value();
  const TraceFile further =
      killed([](const TraceFile& file) { return of_kind(file, TraceKind::kCompute).size() == 2; });
  const auto computed = of_kind(further, TraceKind::kCompute);
  EXPECT_EQ(computed[0].use, 0u);  // has ended
  EXPECT_EQ(computed[1].use, 1u);  // lasts
  EXPECT_LE(computed[0].end_ns, computed[1].begin_ns);
  EXPECT_EQ(computed[0].unit, index_of(schedule_[0].unit));
  second.set_value();
  device_->synchronize(stream_.id());
}

TEST_F(StepUnderWay, EveryPartOfAWaitHasItsCause) {
  lease(0);
  timeline_.arrive(1, stream_.id());
  device_->synchronize(stream_.id());  // what is waited for before computation is there, is none
  timeline_.waits_for(1, {.reason = TraceReason::kRead, .unit = 1, .block = 5});
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  timeline_.waits_for(1, {.reason = TraceReason::kWindow, .unit = 1});
  const auto reasons = [](const TraceFile& file) {
    std::vector<TraceReason> list;
    for (const TraceRecord& record : of_kind(file, TraceKind::kWait)) {
      if (record.reason != TraceReason::kNone) list.push_back(record.reason);
    }
    return list;
  };
  const std::vector<TraceReason> both{TraceReason::kRead, TraceReason::kWindow};
  const TraceFile file =
      killed([&](const TraceFile& of) { return reasons(of).size() == both.size(); });
  EXPECT_EQ(reasons(file), both);
  timeline_.ready();
  timeline_.resume(1, stream_.id(), {.scheduled = schedule_[1]});
}

// A use with many blocks, each with causes of its own, leaves room for the causes of later uses.
TEST_F(StepUnderWay, ManyCausesOfEarlierUsesLeaveLaterOnesTheirs) {
  constexpr std::uint32_t kBlocks = 60;
  const auto last = static_cast<std::uint32_t>(schedule_.size() - 1);
  const auto wait = [&](std::uint32_t use, TraceReason reason, std::uint32_t block) {
    timeline_.waits_for(use, {.reason = reason, .unit = 1, .block = block});
  };
  for (std::uint32_t use = 0; use <= last; ++use) {
    timeline_.arrive(use, stream_.id());
    device_->synchronize(stream_.id());
    for (std::uint32_t block = 0; block < kBlocks; ++block) {
      wait(use, TraceReason::kUpdateRead, block);
      if (use != last) wait(use, TraceReason::kUpdateWrite, block);
    }
    if (use == last) {
      wait(use, TraceReason::kUpdate, 7);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      wait(use, TraceReason::kUpdate, 8);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    timeline_.ready();
    timeline_.resume(use, stream_.id(), {.scheduled = schedule_[use]});
  }
  Event released(*device_);
  device_->record(released.id(), stream_.id());
  device_->synchronize(stream_.id());
  timeline_.ends(released.id());
  timeline_.waits_for(kTraceNone, {.reason = TraceReason::kNorm});
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  const StepTimes times = timeline_.finish(steady_now_ns(), {});
  const auto waited = [&](TraceReason reason) {
    return times.wait_ns[static_cast<std::size_t>(reason)];
  };
  EXPECT_GE(waited(TraceReason::kUpdate), 10'000'000);
  EXPECT_GE(waited(TraceReason::kNorm), 2'000'000);
}

// An acquire() that fails, after which the application ends the step.
TEST_F(StepUnderWay, EndsThoughTheLastAcquireHasFailed) {
  lease(0);
  timeline_.arrive(1, stream_.id());
  timeline_.waits_for(1, {.reason = TraceReason::kRead, .unit = 1});
  Event released(*device_);
  device_->record(released.id(), stream_.id());
  device_->synchronize(stream_.id());
  timeline_.ends(released.id());
  timeline_.waits_for(kTraceNone, {.reason = TraceReason::kNorm});
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  const StepTimes times = timeline_.finish(steady_now_ns(), {});
  EXPECT_EQ(times.total_ns, times.compute_ns + times.exposed_ns() + times.other_ns);
  EXPECT_GE(times.wait_ns[static_cast<std::size_t>(TraceReason::kNorm)], 2'000'000);
}

}  // namespace
}  // namespace sluice::test
