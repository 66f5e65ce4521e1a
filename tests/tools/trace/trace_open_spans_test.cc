// Traces of runs that were killed: what had begun.
#include <gtest/gtest.h>

#include <map>

#include "tests/support/file_text.h"
#include "tests/support/temp_directory.h"
#include "tools/trace/trace_analysis.h"

namespace sluice::test {
namespace {

constexpr std::size_t kEndBytes = 128;  // the section "end"

std::vector<std::byte> file_bytes(const std::string& path) {
  const std::string text = test::file_text(path);
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// A span that had begun when a run was killed lasts until its trace ends; one that ended is there
// once.
TEST(OpenSpans, LastUntilTheEnd) {
  const TempDirectory directory;
  const std::string path = directory.path() + "/open.trace";
  trace_start({.file = path});
  const auto compute = [](std::uint64_t begin) {
    return TraceRecord{.begin_ns = begin, .step = 2, .unit = 7, .kind = TraceKind::kCompute};
  };
  const auto resident = [](std::uint64_t begin, std::uint32_t unit) {
    return TraceRecord{.begin_ns = begin, .step = 1, .unit = unit, .kind = TraceKind::kResident};
  };
  const auto ended = [](TraceRecord record, std::uint64_t end) {
    record.end_ns = end;
    trace_record(record);
  };
  const TraceRecord steps[] = {{.begin_ns = 100, .step = 1, .kind = TraceKind::kStep},
                               {.begin_ns = 200, .step = 2, .kind = TraceKind::kStep}};
  trace_begin(steps[0]);
  trace_begin(compute(110));
  trace_begin(resident(120, 3));
  trace_begin(resident(130, 4));
  ended(resident(120, 3), 160);
  ended(compute(110), 150);
  ended(steps[0], 190);
  trace_begin(steps[1]);
  trace_begin(compute(210));
  ended(compute(210), 240);
  trace_begin({.begin_ns = 240, .step = 2, .kind = TraceKind::kWait});
  ended({.begin_ns = 205, .kind = TraceKind::kWrite}, 300);
  (void)trace_stop();

  const std::vector<std::byte> whole = file_bytes(path);
  EXPECT_EQ(parse_trace("whole", whole).records.size(), 5u);
  EXPECT_EQ(parse_trace("whole", whole).open_step, 0u);
  const auto killed = std::span(whole).first(whole.size() - kEndBytes);
  const TraceFile file = parse_trace("killed", killed);
  EXPECT_FALSE(file.is_complete);
  EXPECT_EQ(file.open_step, 2u);
  ASSERT_EQ(file.records.size(), 5u + 3);
  std::map<TraceKind, TraceRecord> open;
  for (std::size_t i = 5; i < file.records.size(); ++i) {
    open[file.records[i].kind] = file.records[i];
    EXPECT_EQ(file.records[i].end_ns, 300u);
  }
  EXPECT_EQ(open.at(TraceKind::kStep).begin_ns, 200u);
  EXPECT_EQ(open.at(TraceKind::kWait).begin_ns, 240u);
  EXPECT_EQ(open.at(TraceKind::kResident).unit, 4u);
  const TraceAnalysis analysis(file);
  ASSERT_EQ(analysis.steps().size(), 2u);
  EXPECT_FALSE(analysis.steps()[0].is_open);
  EXPECT_TRUE(analysis.steps()[1].is_open);
  EXPECT_EQ(analysis.steps()[1].compute_ns, 30);
}

// A step that was abandoned has no end. It is not taken for the step in which the run was killed.
TEST(OpenSpans, AnAbandonedStepIsNone) {
  for (const bool is_in_step : {false, true}) {
    const TempDirectory directory;
    const std::string path = directory.path() + "/open.trace";
    trace_start({.file = path});
    trace_begin({.begin_ns = 100, .step = 5, .kind = TraceKind::kStep});
    trace_begin({.begin_ns = 200, .step = 5, .kind = TraceKind::kStep});
    trace_record({.begin_ns = 200, .end_ns = 300, .step = 5, .kind = TraceKind::kStep});
    if (is_in_step) trace_begin({.begin_ns = 400, .step = 6, .kind = TraceKind::kStep});
    trace_record({.begin_ns = 320, .end_ns = 500, .kind = TraceKind::kWrite});
    (void)trace_stop();
    const std::vector<std::byte> whole = file_bytes(path);
    const TraceFile file = parse_trace("killed", std::span(whole).first(whole.size() - kEndBytes));
    EXPECT_EQ(file.open_step, is_in_step ? 6u : 0u);
    EXPECT_EQ(file.records.size(), is_in_step ? 3u : 2u);
    EXPECT_EQ(TraceAnalysis(file).steps().size(), is_in_step ? 2u : 1u);
  }
}

// Computation that was announced and has ended is not there a second time.
TEST(OpenSpans, ComputationThatEndedIsNone) {
  const TempDirectory directory;
  const std::string path = directory.path() + "/open.trace";
  trace_start({.file = path});
  trace_begin({.begin_ns = 210, .unit = 7, .kind = TraceKind::kCompute});
  trace_record({.begin_ns = 210, .end_ns = 240, .unit = 7, .kind = TraceKind::kCompute});
  trace_record({.begin_ns = 220, .end_ns = 300, .kind = TraceKind::kWrite});
  (void)trace_stop();
  const std::vector<std::byte> whole = file_bytes(path);
  const TraceFile file = parse_trace("killed", std::span(whole).first(whole.size() - kEndBytes));
  EXPECT_FALSE(file.is_complete);
  EXPECT_EQ(file.records.size(), 2u);
}

}  // namespace
}  // namespace sluice::test
