// Summaries and pages count steps of training that ended, of all ranks, against each drive.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/run/step_timeline.h"
#include "tests/tools/trace/trace_builder.h"
#include "tools/trace/trace_html.h"
#include "tools/trace/trace_json.h"
#include "tools/trace/trace_steps.h"
#include "tools/trace/trace_summary.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kStepNs = 1'000'000'000;

std::uint64_t begin_of(std::uint64_t step) {
  return step * 2 * kStepNs;
}

TraceRecord of_step(TraceRecord record, std::uint64_t step) {
  record.step = step;
  return record;
}

// Steps of a second, one second apart. Each of them writes 4096 bytes.
std::vector<TraceRecord> steps_up_to(std::uint64_t last) {
  std::vector<TraceRecord> records;
  for (std::uint64_t step = 1; step <= last; ++step) {
    const std::uint64_t at = begin_of(step);
    records.push_back(of_step(span(TraceKind::kStep, at, at + kStepNs), step));
    records.push_back(of_step(span(TraceKind::kCompute, at, at + kStepNs, 0), step));
    records.push_back(
        of_step(transfer(TraceKind::kRead, 0, at + 1, at + 2, at + 1000, at + 1001), step));
    records.push_back(
        of_step(transfer(TraceKind::kWrite, 0, at + 1, at + 2, at + 1000, at + 1001), step));
  }
  return records;
}

nlohmann::json rank_of_page(const std::string& page) {
  const std::size_t begin = page.find("{\"subjects\"");
  return nlohmann::json::parse(
      page.substr(begin, page.find("</script>", begin) - begin))["ranks"][0];
}

// Where an application waits for the rest of an update before the next step, the wait is part of
// the step's time, with its cause. After the last step, it is the end of the run.
TEST(Steps, WaitsForTheirUpdateAreTheirs) {
  constexpr std::uint64_t kDrainNs = kStepNs / 4;
  std::vector<TraceRecord> records = steps_up_to(4);
  for (std::uint64_t step = 1; step <= 4; ++step) {
    const std::uint64_t at = begin_of(step) + kStepNs + 1000;
    TraceRecord drain = of_step(wait(TraceReason::kUpdate, at, at + kDrainNs, 0), step);
    drain.detail = kTraceAfterStep;
    records.push_back(drain);
    drain.reason = TraceReason::kNone;  // hand-overs of the engine
    records.push_back(drain);
    drain.reason = TraceReason::kUpdate;
    drain.detail = 0;  // of no step
    records.push_back(drain);
  }
  const TraceFile file = trace_of(std::move(records));
  const TraceAnalysis analysis(file);
  for (std::size_t i = 0; i < 4; ++i) {
    const StepShare& step = analysis.steps()[i];
    const auto drained_ns = static_cast<std::int64_t>(i == 3 ? 0 : kDrainNs);
    EXPECT_EQ(step.drained_ns, drained_ns);
    EXPECT_EQ(step.total_ns(), static_cast<std::int64_t>(kStepNs) + drained_ns);
    EXPECT_EQ(step.exposed_optimizer_ns, drained_ns);
    EXPECT_EQ(step.by_cause[static_cast<std::size_t>(StallCause::kAdam)], drained_ns);
    EXPECT_EQ(step.other_ns, 0);
  }
  const StepMeans means = means_of(steady_steps(analysis));
  EXPECT_DOUBLE_EQ(means.total_s, 1 + 0.5 / 3);
  const auto groups = group_stalls(analysis);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].total_ns, 2 * kDrainNs);
  const auto waits = rank_of_page(html_of({analysis}, {}))["waits"];
  ASSERT_EQ(waits.size(), 1u);
  EXPECT_EQ(waits[0]["count"], 2);
}

TEST(StorageBytes, LeaveOutWhatAnEvaluationReads) {
  std::vector<TraceRecord> records = steps_up_to(5);
  for (std::uint64_t step = 1; step <= 5; ++step) {
    const std::uint64_t at = begin_of(step) - kStepNs / 2;  // before the step whose number it has
    for (int i = 0; i < 3; ++i)
      records.push_back(
          of_step(transfer(TraceKind::kRead, 0, at, at + 1, at + 1000, at + 1001), step));
  }
  const TraceFile file = trace_of(std::move(records));
  const auto bytes = storage_bytes(TraceAnalysis(file), {});
  ASSERT_TRUE(bytes.has_value());
  EXPECT_EQ(bytes->read_per_step, 4096);
  EXPECT_EQ(bytes->written_per_step, 4096);
}

// A skipped step has the number of the step after it.
TEST(StorageBytes, CountSkippedStepsAndNotTheirNumbers) {
  std::vector<TraceRecord> records = steps_up_to(7);
  constexpr std::uint64_t kNumbers[] = {0, 1, 1, 1, 2, 3, 3, 4};
  for (TraceRecord& record : records) record.step = kNumbers[record.step];
  for (const std::uint64_t step : {2u, 4u, 5u}) {  // evaluations, also after skipped steps
    const std::uint64_t at = begin_of(step) + kStepNs + kStepNs / 2;
    records.push_back(of_step(transfer(TraceKind::kRead, 0, at, at + 1, at + 1000, at + 1001),
                              kNumbers[step + 1]));
  }
  const TraceFile file = trace_of(std::move(records));
  const TraceAnalysis analysis(file);
  const auto bytes = storage_bytes(analysis, {});
  ASSERT_TRUE(bytes.has_value());
  EXPECT_EQ(bytes->read_per_step, 4096);
  EXPECT_EQ(bytes->written_per_step, 4096);
  // The first two of number 1, and the first of number 3, were skipped.
  std::vector<std::uint64_t> updated;
  for (const StepShare& step : updated_steps(analysis))
    updated.push_back(step.begin_ns / (2 * kStepNs));
  EXPECT_EQ(updated, (std::vector<std::uint64_t>{4, 7}));
}

TEST(StorageBytes, RatingIsForAllRanks) {
  std::vector<TraceFile> files(2, trace_of(steps_up_to(5)));
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    files[rank].rank = rank;
    files[rank].ranks = 2;
  }
  std::vector<TraceAnalysis> one, both;
  one.emplace_back(files[0]);
  for (const TraceFile& file : files) both.emplace_back(file);
  const SummaryOptions options{.peaks = {}, .bytes_written_rating = 1'000'000'000'000};
  const auto days = [&](const std::vector<TraceAnalysis>& ranks) {
    const auto json = nlohmann::json::parse(summary_json(ranks, options));
    return json["ranks"][0]["storage"]["drives_last_days"].get<double>();
  };
  EXPECT_DOUBLE_EQ(days(both), days(one) / 2);
  EXPECT_NE(summary_of(both, options).find(" by all ranks here; drives rated"), std::string::npos);
}

TEST(SummaryJson, HasTheClockOfARank) {
  TraceFile file = trace_of(steps_up_to(3));
  std::vector<TraceAnalysis> ranks;
  ranks.emplace_back(file);
  const auto clock = [&] { return nlohmann::json::parse(summary_json(ranks, {}))["ranks"][0]; };
  ASSERT_TRUE(clock().contains("clock"));
  EXPECT_TRUE(clock()["clock"].is_null());
  file.clock_offset_ns = -2'000'000'000;
  file.clock_error_ns = 1000;
  EXPECT_NEAR(clock()["clock"]["offset_s"].get<double>(), -2, 1e-12);
  EXPECT_NEAR(clock()["clock"]["error_s"].get<double>(), 1e-6, 1e-15);
}

TEST(PeakRates, AreThoseOfEachDrive) {
  const PeakRates peaks{.read_bytes_per_second = 5,
                        .write_bytes_per_second = 4,
                        .drives = {{"/a", 2, 1}, {"/b", 3, 2}}};
  const auto peak = [&](std::uint32_t drive, std::vector<std::string> paths,
                        TraceKind kind = TraceKind::kRead) {
    TracedEngine engine;
    engine.storage_paths = std::move(paths);
    FlowStats flow;
    flow.kind = kind;
    flow.drive = drive;
    return peak_of(flow, engine, peaks);
  };
  EXPECT_EQ(peak(0, {"/a", "/b"}), 2);
  EXPECT_EQ(peak(1, {"/a", "/b"}), 3);
  EXPECT_EQ(peak(1, {"/a", "/b"}, TraceKind::kWrite), 2);
  EXPECT_EQ(peak(0, {"/b", "/a"}), 3);  // in another order
  EXPECT_EQ(peak(1, {"/x", "/y"}), 3);  // of as many
  EXPECT_EQ(peak(0, {"/b/", "/x/../a"}), 3);
  EXPECT_EQ(peak(0, {"/x", "/a"}), 0);  // another one is known, so the number says nothing
  EXPECT_EQ(peak(0, {"b/", "a"}), 0);
  EXPECT_EQ(peak(0, {"/b"}), 3);
  EXPECT_EQ(peak(0, {"x"}), 0);  // any of the two
  EXPECT_EQ(peak(0, {"x", "y", "z"}), 0);
  EXPECT_EQ(peak(0, {"/a", "/b"}, TraceKind::kCopyToDevice), 0);
  EXPECT_EQ(peak_of(FlowStats(), {}, {.read_bytes_per_second = 5, .drives = {}}), 5);
}

TEST(Page, LeavesTheCutStepOutOfItsMeans) {
  std::vector<TraceRecord> records = steps_up_to(4);
  for (std::uint64_t step = 3; step <= 4; ++step) {
    const std::uint64_t at = begin_of(step);
    records.push_back(of_step(wait(TraceReason::kCollective, at, at + step * 1000), step));
  }
  TraceFile file = trace_of(std::move(records));
  file.open_step = 4;
  file.is_complete = false;
  std::vector<TraceAnalysis> ranks;
  ranks.emplace_back(file);
  const nlohmann::json rank = rank_of_page(html_of(ranks, {}));
  // The steps 2 and 3, which take a second each.
  EXPECT_NEAR(rank["split"]["compute"].get<double>(), 100, 1e-9);
  EXPECT_NEAR(rank["split"]["io"].get<double>(), 100 * 3e-6 / 2, 1e-9);
  ASSERT_EQ(rank["waits"].size(), 1u);
  EXPECT_EQ(rank["waits"][0]["count"], 1);
  EXPECT_EQ(rank["waits"][0]["total_us"], 3);
}

// The only step is cut: there is no step to speak of, but what was at work is known.
TEST(Summary, OfARunThatWasKilledInItsFirstStepHasNoStep) {
  TraceFile file = trace_of(steps_up_to(1));
  file.records.push_back(of_step(wait(TraceReason::kRead, begin_of(1), begin_of(1) + 1000), 1));
  file.open_step = 1;
  file.is_complete = false;
  std::vector<TraceAnalysis> ranks;
  ranks.emplace_back(file);
  EXPECT_EQ(means_of(steady_steps(ranks[0])).count, 0u);
  const std::string text = summary_of(ranks, {});
  EXPECT_TRUE(text.starts_with("no step ended while it was traced\n")) << text;
  EXPECT_NE(text.find("which ends in step 1"), std::string::npos) << text;
  EXPECT_NE(
      text.find("at work in the 1000.00 ms from the first record to the last: compute 100.0 %, "
                "waits 0.0 %, storage 0.0 %\n"),
      std::string::npos)
      << text;
  EXPECT_EQ(text.find("mean step"), std::string::npos) << text;
  const auto json = nlohmann::json::parse(summary_json(ranks, {}))["ranks"][0];
  EXPECT_EQ(json["steady_steps"]["count"], 0);
  EXPECT_EQ(json["waits"].size(), 0u);
  const nlohmann::json rank = rank_of_page(html_of(ranks, {}));
  EXPECT_NE(rank["head"].get<std::string>().find("1 steps, none of which ended"),
            std::string::npos);
  EXPECT_EQ(rank["split"]["compute"], 0);
  EXPECT_EQ(rank["waits"].size(), 0u);
  EXPECT_EQ(rank["steps"].size(), 1u);
}

// It has no steps, but updates, reads and writes.
TEST(Summary, OfAnOptimizerAloneTellsOfItsUpdates) {
  std::vector<TraceRecord> records;
  for (std::uint64_t i = 0; i < 10; ++i) {
    const std::uint64_t at = 1'000'000 + i * 1'000'000;
    const auto block = static_cast<std::uint32_t>(i);
    records.push_back(transfer(TraceKind::kRead, block, at, at, at + 200'000, at + 200'000));
    records.push_back(span(TraceKind::kAdam, at + 200'000, at + 700'000, block, block));
    records.back().size_bytes = 1'000'000;
    records.push_back(transfer(TraceKind::kWrite, block, at + 700'000, at + 700'000, at + 1'000'000,
                               at + 1'000'000));
  }
  const TraceFile file = trace_of(std::move(records));
  std::vector<TraceAnalysis> ranks;
  ranks.emplace_back(file);
  const std::string text = summary_of(ranks, {});
  EXPECT_NE(
      text.find("at work in the 10.00 ms from the first record to the last: updates and norms "
                "50.0 %, storage 50.0 %\n"
                "10 updates of blocks: 9.54 MiB of state at 2.00 GB/s, 0.500 ms each\n"),
      std::string::npos)
      << text;
  EXPECT_NE(text.find("read drive 0"), std::string::npos) << text;
}

}  // namespace
}  // namespace sluice::test
