// The analysis of collectives: traces of ranks whose times are known in closed form.
#include <gtest/gtest.h>

#include <sluice/collectives.h>
#include "tests/tools/trace/trace_builder.h"
#include "tools/trace/trace_diff.h"
#include "tools/trace/trace_html.h"
#include "tools/trace/trace_ranks.h"
#include "tools/trace/trace_summary.h"

namespace sluice::test {
namespace {

TraceRecord collective(std::uint8_t sort, std::uint64_t begin, std::uint64_t end,
                       std::uint32_t unit) {
  TraceRecord record = span(TraceKind::kCollective, begin, end, unit);
  record.detail = sort;
  record.size_bytes = 1000;
  return record;
}

TraceFile trace_of_rank(std::uint32_t rank, std::vector<TraceRecord> records) {
  TraceFile file = trace_of(std::move(records));
  file.rank = rank;
  file.ranks = 3;
  return file;
}

// n units are gathered one after another, each in G ns; computation takes C ns per unit, each when
// its unit is there; then n reductions of R ns, for which the end of the step waits.
struct Gathers {
  std::uint64_t n, g, c, r;
};

class GathersTest : public testing::TestWithParam<Gathers> {};

TEST_P(GathersTest, AreAsComputedByHand) {
  const auto [n, g, c, r] = GetParam();
  std::vector<TraceRecord> records;
  std::uint64_t now = 0;
  for (std::uint32_t i = 0; i < n; ++i) {
    const std::uint64_t arrived = (i + 1) * g;
    records.push_back(collective(kTraceGather, arrived - g, arrived, i));
    if (arrived > now) records.push_back(wait(TraceReason::kCollective, now, arrived, i));
    now = std::max(now, arrived);
    records.push_back(span(TraceKind::kCompute, now, now + c, i));
    now += c;
  }
  for (std::uint32_t i = 0; i < n; ++i)
    records.push_back(collective(kTraceReduce, now + i * r, now + (i + 1) * r, i));
  records.push_back(wait(TraceReason::kCollective, now, now + n * r));
  records.push_back(collective(kTraceVote, now + n * r, now + n * r + 50, kTraceNone));
  records.push_back(span(TraceKind::kStep, 0, now + n * r + 100));
  const TraceFile file = trace_of(std::move(records));
  const TraceAnalysis analysis(file);
  const StepShare& step = analysis.steps().at(0);
  const std::uint64_t exposed = (g >= c ? n * g - (n - 1) * c : g) + n * r;
  EXPECT_EQ(step.compute_ns, static_cast<std::int64_t>(n * c));
  EXPECT_EQ(step.exposed_io_ns, static_cast<std::int64_t>(exposed));
  EXPECT_EQ(step.other_ns, 100);
  // Waiting for other ranks is no waiting for storage, copies or the optimizer, which did nothing.
  EXPECT_EQ(step.background_ns, 0u);
  EXPECT_EQ(step.rank_wait_ns, step.exposed_io_ns);
  EXPECT_EQ(step.hidden_ns(), 0);
  EXPECT_EQ(step.by_cause[static_cast<std::size_t>(StallCause::kCollective)], step.exposed_io_ns);

  ASSERT_EQ(analysis.flows().size(), 2u);  // votes are none
  const FlowStats &gathers = analysis.flows()[0], &reductions = analysis.flows()[1];
  EXPECT_EQ(name_of(gathers.key()), "gather");
  EXPECT_EQ(name_of(reductions.key()), "reduction");
  EXPECT_EQ(gathers.spans, n);
  EXPECT_EQ(gathers.size_bytes, n * 1000);
  EXPECT_EQ(gathers.busy_ns, n * g);
  EXPECT_EQ(gathers.device.p999_ns, g);
  EXPECT_EQ(gathers.queue.p999_ns, 0u);
  EXPECT_DOUBLE_EQ(reductions.bytes_per_second(), 1e12 / static_cast<double>(r));
}

INSTANTIATE_TEST_SUITE_P(All, GathersTest,
                         testing::Values(Gathers{1, 10, 10, 10}, Gathers{2, 10, 30, 5},
                                         Gathers{2, 30, 10, 5}, Gathers{9, 1000, 999, 1},
                                         Gathers{9, 999, 1000, 1}, Gathers{100, 7, 3, 11}),
                         [](const auto& test) {
                           return "n" + std::to_string(test.param.n) + "g" +
                                  std::to_string(test.param.g) + "c" + std::to_string(test.param.c);
                         });

// Rank 1 comes 300 after the first to each of four gathers of unit 5, but 100 before rank 2 to the
// last.
std::vector<TraceFile> late_ranks() {
  std::vector<std::vector<TraceRecord>> records(3);
  for (std::uint64_t i = 0; i < 4; ++i) {
    const std::uint64_t begin = 10'000 * i;
    const std::uint64_t late[] = {0, 300, i == 3 ? 400u : 100u};
    for (std::size_t rank = 0; rank < 3; ++rank)
      records[rank].push_back(collective(kTraceGather, begin + late[rank], begin + 1000, 5));
  }
  std::vector<TraceFile> files;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    TraceRecord evaluation = collective(kTraceGather, 3'000'000 + rank, 3'000'100, 5);
    evaluation.step = 2;  // which never comes
    records[rank].push_back(evaluation);
    records[rank].push_back(span(TraceKind::kStep, 0, 2'000'000));
    files.push_back(trace_of_rank(rank, std::move(records[rank])));
  }
  return files;
}

std::vector<TraceAnalysis> analyses_of(const std::vector<TraceFile>& files) {
  return {files.begin(), files.end()};
}

TEST(RankLags, NameWhoCameLast) {
  const std::vector<TraceFile> files = late_ranks();
  const RankLags lags = rank_lags(analyses_of(files));
  EXPECT_EQ(lags.collectives, 4u);
  ASSERT_EQ(lags.ranks.size(), 3u);
  EXPECT_EQ(lags.ranks[0].last, 0u);
  EXPECT_EQ(lags.ranks[0].late_ns, 0u);
  EXPECT_EQ(lags.ranks[1].last, 3u);
  EXPECT_EQ(lags.ranks[1].late_ns, 600u);  // 200 after rank 2 each
  EXPECT_EQ(lags.ranks[2].last, 1u);
  EXPECT_EQ(lags.ranks[2].late_ns, 100u);
  EXPECT_NE(summary_of(analyses_of(files), {})
                .find("the others wait for rank 1 most: last to 3 of 4 collectives"),
            std::string::npos);
}

TEST(RankLags, OneRankWaitsForNobody) {
  std::vector<TraceFile> files = late_ranks();
  files.resize(1);
  EXPECT_EQ(rank_lags(analyses_of(files)).collectives, 0u);
}

// Where a record is lost, those of its unit and step cannot be told apart.
TEST(RankLags, LeaveOutWhatIsNotWhole) {
  std::vector<TraceFile> files = late_ranks();
  files[1].records.erase(files[1].records.begin());
  for (TraceFile& file : files)
    file.records.push_back(collective(kTraceReduce, 50'000 + file.rank, 60'000, 5));
  const RankLags lags = rank_lags(analyses_of(files));
  EXPECT_EQ(lags.collectives, 1u);
  EXPECT_EQ(lags.ranks[2].last, 1u);
}

TEST(Collectives, AreOnThePageAndInComparisons) {
  std::vector<TraceFile> files = late_ranks();
  const std::string page = html_of(analyses_of(files), {});
  EXPECT_NE(page.find("among ranks"), std::string::npos);
  EXPECT_NE(page.find(R"("name":"gather")"), std::string::npos);
  for (TraceFile& file : files) {
    for (std::uint64_t step = 2; step < 5; ++step) {
      TraceRecord record = span(TraceKind::kStep, step * 3'000'000, step * 3'000'000 + 2'000'000);
      record.step = step;
      file.records.push_back(record);
      file.records.push_back(wait(TraceReason::kCollective, record.begin_ns,
                                  record.begin_ns + 1'000'000 * file.rank, 5));
    }
  }
  const TraceDiff diff = diff_of(TraceAnalysis(files[1]), TraceAnalysis(files[2]));
  ASSERT_EQ(diff.causes.size(), 1u);
  EXPECT_EQ(diff.causes[0].name, "collective");
  EXPECT_DOUBLE_EQ(diff.causes[0].difference_ms(), 1);
}

}  // namespace
}  // namespace sluice::test
