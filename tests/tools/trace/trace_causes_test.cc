// The analysis of traces whose overlap, percentiles and causes are known in closed form.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/tools/trace/trace_builder.h"

namespace sluice::test {
namespace {

// One drive reads n blocks one after another, each for R ns, all asked for at the start;
// computation takes C ns per block, in order, each when its block is there.
struct Pipeline {
  std::uint64_t n, r, c;
};

constexpr std::uint64_t kStart = 1'000'000;

class PipelineTest : public testing::TestWithParam<Pipeline> {
 protected:
  // And the step ends with the last computation.
  static TraceFile trace(const Pipeline& pipeline) {
    const auto [n, r, c] = pipeline;
    std::vector<TraceRecord> records;
    std::uint64_t now = kStart;
    for (std::uint64_t i = 0; i < n; ++i) {
      const std::uint64_t arrived = kStart + (i + 1) * r;
      records.push_back(transfer(TraceKind::kRead, static_cast<std::uint32_t>(i), kStart,
                                 arrived - r, arrived, arrived));
      if (arrived > now)
        records.push_back(wait(TraceReason::kRead, now, arrived, static_cast<std::uint32_t>(i)));
      now = std::max(now, arrived);
      records.push_back(span(TraceKind::kCompute, now, now + c, static_cast<std::uint32_t>(i)));
      now += c;
    }
    records.push_back(span(TraceKind::kStep, kStart, now));
    std::ranges::reverse(records);  // files are in no order
    return trace_of(std::move(records));
  }
};

TEST_P(PipelineTest, IsAsComputedByHand) {
  const auto [n, r, c] = GetParam();
  const TraceFile file = trace(GetParam());
  const TraceAnalysis analysis(file);
  const std::uint64_t exposed = r >= c ? n * r - (n - 1) * c : r;
  ASSERT_EQ(analysis.steps().size(), 1u);
  const StepShare& step = analysis.steps()[0];
  EXPECT_EQ(step.compute_ns, static_cast<std::int64_t>(n * c));
  EXPECT_EQ(step.exposed_io_ns, static_cast<std::int64_t>(exposed));
  EXPECT_EQ(step.exposed_optimizer_ns, 0);
  EXPECT_EQ(step.other_ns, 0);
  EXPECT_EQ(step.total_ns(), step.compute_ns + step.exposed_ns() + step.other_ns);
  EXPECT_EQ(step.background_ns, n * r);
  EXPECT_EQ(step.exposed_ns() + step.hidden_ns(), static_cast<std::int64_t>(n * r));
  // The first was asked for when the drive was idle: it could have been sooner. The others were
  // behind it.
  EXPECT_EQ(step.by_cause[static_cast<std::size_t>(StallCause::kLatePrefetch)],
            static_cast<std::int64_t>(r));
  EXPECT_EQ(step.by_cause[static_cast<std::size_t>(StallCause::kBandwidth)],
            static_cast<std::int64_t>(exposed - r));

  ASSERT_EQ(analysis.flows().size(), 1u);
  const FlowStats& flow = analysis.flows()[0];
  EXPECT_EQ(flow.spans, n);
  EXPECT_EQ(flow.size_bytes, n * 4096);
  EXPECT_EQ(flow.busy_ns, n * r);
  EXPECT_DOUBLE_EQ(flow.bytes_per_second(), 4096e9 / static_cast<double>(r));
  EXPECT_EQ(flow.device.p50_ns, r);
  EXPECT_EQ(flow.device.p999_ns, r);
  // Queue times are 0, R, 2R ...: the nearest rank of half of them.
  EXPECT_EQ(flow.queue.p50_ns, ((n + 1) / 2 - 1) * r);
  EXPECT_EQ(flow.queue.p99_ns, ((n * 99 + 99) / 100 - 1) * r);
  EXPECT_EQ(flow.queue.p999_ns, ((n * 999 + 999) / 1000 - 1) * r);
  EXPECT_EQ(flow.whole.p50_ns, (n + 1) / 2 * r);
}

INSTANTIATE_TEST_SUITE_P(All, PipelineTest, testing::ValuesIn([] {
                           std::vector<Pipeline> cases;
                           for (const std::uint64_t n : {1, 2, 3, 7, 100, 160, 2000}) {
                             for (const auto& [r, c] :
                                  {std::pair<std::uint64_t, std::uint64_t>{1000, 1000},
                                   {1000, 999},
                                   {1000, 1001},
                                   {500, 1500},
                                   {1500, 500},
                                   {3, 7000},
                                   {7000, 3}})
                               cases.push_back({n, r, c});
                           }
                           return cases;
                         }()),
                         [](const auto& test) {
                           return "n" + std::to_string(test.param.n) + "r" +
                                  std::to_string(test.param.r) + "c" + std::to_string(test.param.c);
                         });

// One wait, from 10'000 to 11'000 for block 7, and what else there was.
struct Judged {
  const char* name;
  TraceReason reason;
  std::vector<TraceRecord> beside;
  StallCause cause;
};

// Reads of the same plane, of which most take 500 ns at the drive.
std::vector<TraceRecord> with_usual_reads(std::vector<TraceRecord> records) {
  for (std::uint32_t block = 100; block < 110; ++block)
    records.push_back(transfer(TraceKind::kRead, block, 1000, 1000, 1500, 1500));
  return records;
}

TraceRecord copy(std::uint64_t begin, std::uint64_t started, std::uint64_t end,
                 std::uint32_t unit) {
  TraceRecord record = transfer(TraceKind::kCopyToDevice, unit, begin, started, end, end);
  return record;
}

TraceRecord read(std::uint64_t begin, std::uint64_t started, std::uint64_t moved, std::uint64_t end,
                 std::uint8_t plane = kTraceParameters) {
  return transfer(TraceKind::kRead, 7, begin, started, moved, end, plane);
}

// An activation of unit 7.
TraceRecord activation(TraceKind kind, std::uint64_t begin, std::uint64_t end) {
  TraceRecord record = transfer(kind, 7, begin, begin, end, end, kTraceActivations);
  record.block = kTraceNone;
  return record;
}

TraceRecord busy_drive(std::uint64_t begin, std::uint64_t end) {
  return transfer(TraceKind::kWrite, 50, begin, begin, end, end, kTraceOptimizerState);
}

std::vector<Judged> read_cases() {
  return {
      {"AnIdleDriveCouldHaveBegunSooner",
       TraceReason::kRead,
       {read(9900, 9900, 11000, 11000)},
       StallCause::kLatePrefetch},
      {"HalfIdleIsIdle",
       TraceReason::kRead,
       {read(9900, 9900, 11000, 11000), busy_drive(8900, 9400)},
       StallCause::kLatePrefetch},
      {"MoreThanHalfBusyIsBusy",
       TraceReason::kRead,
       {read(9900, 9900, 11000, 11000), busy_drive(8900, 9401), busy_drive(8000, 9900),
        busy_drive(8000, 9900)},
       StallCause::kBandwidth},
      {"BusyWithOneAtATime",
       TraceReason::kRead,
       {read(9900, 9900, 11000, 11000), busy_drive(8900, 9900)},
       StallCause::kNoBuffer},
      {"BehindAnother",
       TraceReason::kRead,
       {read(9000, 10000, 11000, 11000), busy_drive(9499, 10000)},
       StallCause::kBandwidth},
      {"HeldBackFromAnIdleDrive",
       TraceReason::kRead,
       {read(9000, 10000, 11000, 11000), busy_drive(9500, 10000)},
       StallCause::kLatencyTail},
      {"NotLongBehindAnother",
       TraceReason::kRead,
       {read(9001, 10000, 11000, 11000)},
       StallCause::kLatePrefetch},
      {"FiveTimesAsLongAsUsual", TraceReason::kRead,
       with_usual_reads({read(9000, 9000, 11500, 11500)}), StallCause::kLatencyTail},
      {"FourTimesIsUsual", TraceReason::kRead, with_usual_reads({read(9000, 9000, 11000, 11000)}),
       StallCause::kLatePrefetch},
      {"ATailThatWasNotWaitedFor", TraceReason::kRead,
       with_usual_reads(
           {read(7000, 7000, 10400, 10500), busy_drive(2000, 7000), busy_drive(2000, 7000)}),
       StallCause::kBandwidth},
      {"InItsChecksum",
       TraceReason::kRead,
       {read(9000, 9000, 10400, 11000)},
       StallCause::kChecksum},
      {"HalfInItsChecksum",
       TraceReason::kRead,
       {read(9000, 9000, 10500, 11000)},
       StallCause::kLatePrefetch},
      {"TheOtherPlaneIsAnothersRead",
       TraceReason::kRead,
       {read(9000, 9000, 11000, 11000, kTraceOptimizerState)},
       StallCause::kNoBuffer},
      {"ARecordNobodyHas", TraceReason::kRead, {}, StallCause::kNoBuffer},
  };
}

std::vector<Judged> buffer_cases() {
  return {
      {"OneRequestAtATime", TraceReason::kSlot, {busy_drive(9000, 12000)}, StallCause::kNoBuffer},
      {"ManyRequestsAtATime",
       TraceReason::kSlot,
       {busy_drive(9000, 12000), busy_drive(9000, 12000)},
       StallCause::kBandwidth},
      {"SlotsWaitForTheLink",
       TraceReason::kSlot,
       {copy(9000, 9000, 12000, 3)},
       StallCause::kCopyLink},
      {"TheWindow", TraceReason::kWindow, {busy_drive(9000, 12000)}, StallCause::kNoBuffer},
      {"GradientSlotsIdle", TraceReason::kGradientSlot, {}, StallCause::kNoBuffer},
      {"GradientSlotsCopied",
       TraceReason::kGradientSlot,
       {transfer(TraceKind::kCopyToHost, 3, 9000, 9000, 12000, 12000)},
       StallCause::kCopyLink},
      {"GradientSlotsAdded",
       TraceReason::kGradientSlot,
       {span(TraceKind::kAccumulate, 9000, 12000)},
       StallCause::kAdam},
  };
}

std::vector<Judged> copy_cases() {
  return {
      {"TheLinkWasBusy",
       TraceReason::kCopy,
       {copy(8000, 10000, 11000, 7), copy(8000, 9000, 10000, 3)},
       StallCause::kCopyLink},
      {"QueuedLate", TraceReason::kCopy, {copy(9500, 10000, 11000, 7)}, StallCause::kCopyLink},
      {"ThePlaceWasTaken",
       TraceReason::kCopy,
       {copy(8000, 10000, 11000, 7)},
       StallCause::kNoBuffer},
      {"NoCopy", TraceReason::kCopy, {}, StallCause::kEngine},
  };
}

std::vector<Judged> update_cases() {
  return {
      {"BeingUpdated", TraceReason::kUpdate, {}, StallCause::kAdam},
      {"ItsNorm", TraceReason::kNorm, {}, StallCause::kAdam},
      {"ItsRecordIsLate",
       TraceReason::kUpdateRead,
       {read(9900, 9900, 11000, 11000, kTraceOptimizerState)},
       StallCause::kLatePrefetch},
      {"TheLaterPartCounts",
       TraceReason::kUpdateRead,
       {read(9900, 9900, 11000, 11000, kTraceOptimizerState), read(9900, 9900, 9950, 11001)},
       StallCause::kChecksum},
      {"LanesAreWithTheDrive",
       TraceReason::kUpdateLane,
       {busy_drive(9000, 12000), busy_drive(9000, 12000), busy_drive(10990, 12000)},
       StallCause::kBandwidth},
      {"OneLaneAlone",
       TraceReason::kUpdateLane,
       {busy_drive(9000, 12000), busy_drive(9000, 12000)},
       StallCause::kNoBuffer},
      {"LanesAreWithTheProcessor",
       TraceReason::kUpdateLane,
       {span(TraceKind::kAdam, 9000, 12000)},
       StallCause::kAdam},
      {"LanesAreTooFew", TraceReason::kUpdateLane, {}, StallCause::kNoBuffer},
      {"OnTheirWayHome",
       TraceReason::kUpdateWrite,
       {busy_drive(9000, 12000)},
       StallCause::kBandwidth},
  };
}

std::vector<Judged> other_cases() {
  return {
      {"GradientsComeDown", TraceReason::kGradientCopy, {}, StallCause::kCopyLink},
      {"AnActivationIsReadTooLate",
       TraceReason::kActivation,
       {activation(TraceKind::kRead, 9900, 11000)},
       StallCause::kLatePrefetch},
      {"AnActivationIsOnTheLink",
       TraceReason::kActivation,
       {activation(TraceKind::kCopyToDevice, 9000, 12000)},
       StallCause::kCopyLink},
      {"NoPlaceForAnActivation",
       TraceReason::kActivation,
       {busy_drive(9000, 12000)},
       StallCause::kNoBuffer},
      {"AnActivationsCopyIsNotTheUnits",
       TraceReason::kCopy,
       {activation(TraceKind::kCopyToDevice, 9000, 12000)},
       StallCause::kEngine},
      {"AnActivationsReadIsNotTheBlocks",
       TraceReason::kRead,
       {activation(TraceKind::kRead, 9900, 11000)},
       StallCause::kNoBuffer},
      {"OtherRanks", TraceReason::kCollective, {}, StallCause::kCollective},
      {"AnnouncedUnits", TraceReason::kAnnounce, {}, StallCause::kAnnounce},
      {"ANewSchedule", TraceReason::kSchedule, {}, StallCause::kSchedule},
      {"Nobody", TraceReason::kNone, {busy_drive(9000, 12000)}, StallCause::kEngine},
  };
}

std::vector<Judged> judged_cases() {
  std::vector<Judged> all;
  for (const auto& part :
       {read_cases(), buffer_cases(), copy_cases(), update_cases(), other_cases()})
    all.insert(all.end(), part.begin(), part.end());
  return all;
}

TEST(Causes, EveryWaitHasTheOneThatItWasMadeFor) {
  for (const Judged& judged : judged_cases()) {
    SCOPED_TRACE(judged.name);
    std::vector<TraceRecord> records = judged.beside;
    records.push_back(wait(judged.reason, 10'000, 11'000, 7));
    const TraceFile file = trace_of(std::move(records));
    const TraceAnalysis analysis(file);
    const auto found = std::ranges::find(analysis.stalls(), false, &Stall::is_of_pass);
    ASSERT_NE(found, analysis.stalls().end());
    EXPECT_EQ(name_of(found->cause), name_of(judged.cause));
  }
}

// Two updates with 1 ms between them; block 7's lane and reads decide whose millisecond it is.
struct PassGap {
  const char* name;
  std::vector<TraceRecord> beside;
  bool is_stall;
  StallCause cause;
  std::uint64_t duration_ns;
};

TEST(Causes, ThePassWaitsForReadsAndLanesButNotForGradients) {
  constexpr std::uint64_t kGap = 1'000'000, kEnd = 3'000'000;  // the gap is [2'000'000, 3'000'000)
  const auto lane = [](std::uint64_t begin) {
    return span(TraceKind::kLane, begin, 5'000'000, 7, 7);
  };
  const auto read = [](std::uint64_t begin, std::uint64_t started, std::uint64_t end) {
    return transfer(TraceKind::kRead, 7, begin, started, end, end, kTraceOptimizerState);
  };
  const auto busy_drive = transfer(TraceKind::kWrite, 50, 100'000, 100'000, 2'500'000, 2'500'000);
  const auto also_busy = transfer(TraceKind::kWrite, 51, 100'000, 100'000, 2'500'000, 2'500'000);
  const std::vector<PassGap> gaps = {
      {"Gradient", {lane(500'000), read(500'000, 500'000, 1'500'000)}, false, {}, 0},
      {"LateRead",
       {lane(1'900'000), read(1'900'000, 1'900'000, 2'800'000)},
       true,
       StallCause::kLatePrefetch,
       800'000},
      {"BusyDrive",
       {busy_drive, also_busy, lane(1'900'000), read(1'900'000, 2'500'000, kEnd)},
       true,
       StallCause::kBandwidth,
       kGap},
      {"NoLane", {lane(2'600'000)}, true, StallCause::kNoBuffer, 600'000},
      {"TheProcessor",
       {lane(2'600'000), span(TraceKind::kNorm, 2'000'000, 2'600'000)},
       false,
       {},
       0},
      {"NothingKnown", {}, false, {}, 0},
  };
  for (const PassGap& gap : gaps) {
    SCOPED_TRACE(gap.name);
    std::vector<TraceRecord> records = gap.beside;
    records.push_back(span(TraceKind::kAdam, 1'000'000, 2'000'000, 6, 6));
    records.push_back(span(TraceKind::kAdam, kEnd, 4'000'000, 7, 7));
    const TraceFile file = trace_of(std::move(records));
    const TraceAnalysis analysis(file);
    ASSERT_EQ(analysis.stalls().size(), gap.is_stall ? 1u : 0u);
    if (!gap.is_stall) continue;
    EXPECT_EQ(name_of(analysis.stalls()[0].cause), name_of(gap.cause));
    EXPECT_EQ(analysis.stalls()[0].duration_ns(), gap.duration_ns);
    EXPECT_TRUE(analysis.stalls()[0].is_of_pass);
  }
}

// Waits for the optimizer and for I/O go into different parts, those without a cause into neither.
TEST(Causes, StepsAreSharedOutToTheNanosecond) {
  const TraceFile file = trace_of(
      {span(TraceKind::kStep, 0, 1000), span(TraceKind::kCompute, 100, 300),
       wait(TraceReason::kRead, 300, 350, 1), span(TraceKind::kCompute, 350, 500),
       wait(TraceReason::kUpdate, 500, 620), wait(TraceReason::kNone, 620, 650),
       span(TraceKind::kAdam, 450, 640), span(TraceKind::kStep, 2000, 2100),
       wait(TraceReason::kCopy, 2000, 2100), wait(TraceReason::kCopy, 5000, 5100)});  // in no step
  const TraceAnalysis analysis(file);
  ASSERT_EQ(analysis.steps().size(), 2u);
  const StepShare& step = analysis.steps()[0];
  EXPECT_EQ(step.compute_ns, 350);
  EXPECT_EQ(step.exposed_io_ns, 50);
  EXPECT_EQ(step.exposed_optimizer_ns, 120);
  EXPECT_EQ(step.other_ns, 480);
  EXPECT_EQ(step.background_ns, 190u);
  EXPECT_EQ(step.hidden_ns(), 20);
  EXPECT_EQ(analysis.steps()[1].exposed_io_ns, 100);
}

}  // namespace
}  // namespace sluice::test
