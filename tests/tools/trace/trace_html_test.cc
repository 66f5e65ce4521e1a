// The parts of the page, the exports and the comparison.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include <nlohmann/json.hpp>

#include "tests/support/expect_error.h"
#include "tests/tools/trace/trace_builder.h"
#include "tools/trace/trace_diff.h"
#include "tools/trace/trace_html.h"
#include "tools/trace/trace_lanes.h"

namespace sluice::test {
namespace {

std::vector<std::uint64_t> unpacked(const std::string& text) {
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string raw;
  for (std::size_t i = 0; i < text.size(); i += 4) {
    unsigned four = 0;
    for (std::size_t at = i; at < i + 4; ++at)
      four = four << 6 | static_cast<unsigned>(text[at] == '=' ? 0 : digits.find(text[at]));
    for (int shift : {16, 8, 0}) raw += static_cast<char>(four >> shift & 255);
    if (text[i + 3] == '=') raw.pop_back();
    if (text[i + 2] == '=') raw.pop_back();
  }
  std::vector<std::uint64_t> values;
  std::uint64_t value = 0, scale = 1;
  for (const char c : raw) {
    const auto byte = static_cast<unsigned char>(c);
    value += (byte & 127u) * scale;
    scale *= 128;
    if (byte >= 128) continue;
    values.push_back(value);
    value = 0;
    scale = 1;
  }
  return values;
}

TEST(Lanes, PackedSpansAreUnpackedAsTheyWere) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 50; ++round) {
    std::vector<LaneSpan> spans;
    std::uint64_t begin = 0;
    for (std::uint64_t i = random() % 20; i-- > 0;) {
      begin += random() >> (random() % 60 + 4);
      spans.push_back(
          {begin, random() >> (random() % 60 + 4), static_cast<std::uint32_t>(random() % 300),
           random() % 4 == 0 ? kTraceNone : static_cast<std::uint32_t>(random() % 70000)});
    }
    const auto values = unpacked(pack_spans(spans));
    ASSERT_EQ(values.size(), 4 * spans.size());
    std::uint64_t at = 0;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      at += values[4 * i];
      EXPECT_EQ(at, spans[i].begin_us);
      EXPECT_EQ(values[4 * i + 1], spans[i].length_us);
      EXPECT_EQ(values[4 * i + 2], spans[i].subject);
      EXPECT_EQ(static_cast<std::uint32_t>(values[4 * i + 3] - 1), spans[i].unit);
    }
  }
}

TEST(Lanes, JoinsWhatIsTooCloseAndKeepsTheRest) {
  std::vector<LaneSpan> spans = {{0, 10, 0, 1},   {15, 10, 0, 1},   // 5 apart: one
                                 {60, 10, 0, 1},                    // far: its own
                                 {75, 100, 0, 2},                   // close, but another unit's
                                 {300, 2, 0, 3},  {304, 2, 0, 4}};  // short, of two units
  join_spans(spans, 20);
  ASSERT_EQ(spans.size(), 4u);
  EXPECT_EQ(spans[0].length_us, 25u);
  EXPECT_EQ(spans[1].begin_us, 60u);
  EXPECT_EQ(spans[2].unit, 2u);
  EXPECT_EQ(spans[3].begin_us, 300u);
  EXPECT_EQ(spans[3].length_us, 6u);
  EXPECT_EQ(spans[3].unit, kTraceNone);
}

// `steps` of 10 ms each with `blocks` reads, copies and updates.
TraceFile long_trace(std::uint32_t rank, std::uint64_t steps, std::uint64_t blocks,
                     std::uint64_t step_ns = 10'000'000) {
  std::vector<TraceRecord> records;
  for (std::uint64_t step = 0; step < steps; ++step) {
    const std::uint64_t begin = 1'000'000'000 + step * (step_ns + 1000), each = step_ns / blocks;
    for (std::uint64_t i = 0; i < blocks; ++i) {
      const std::uint64_t at = begin + i * each;
      const auto block = static_cast<std::uint32_t>(i);
      records.push_back(
          transfer(TraceKind::kRead, block, at, at + each / 9, at + each / 3, at + each / 2));
      records.push_back(
          transfer(TraceKind::kCopyToDevice, block, at, at, at + each / 7, at + each / 7));
      records.push_back(span(TraceKind::kAdam, at, at + each / 5, block, block));
      records.push_back(span(TraceKind::kLane, at, at + each, block, block));
      records.push_back(span(TraceKind::kCompute, at, at + each - each / 8, block));
      records.push_back(wait(TraceReason::kRead, at + each - each / 8, at + each, block));
    }
    records.push_back(span(TraceKind::kStep, begin, begin + step_ns));
    for (TraceRecord& record : records) record.step = record.step == 1 ? step + 1 : record.step;
  }
  TraceFile file = trace_of(std::move(records));
  file.rank = rank;
  file.ranks = 8;
  return file;
}

nlohmann::json data_of(const std::string& page) {
  const std::string open = "<script id=\"data\" type=\"application/json\">";
  const std::size_t begin = page.find(open) + open.size();
  return nlohmann::json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

TEST(Page, OfAHundredStepsOfEightRanksStaysSmall) {
  std::vector<TraceFile> files;
  for (std::uint32_t rank = 0; rank < 8; ++rank) files.push_back(long_trace(rank, 100, 200));
  std::vector<TraceAnalysis> ranks;
  for (const TraceFile& file : files) ranks.emplace_back(file);
  const std::string page = html_of(ranks, {});
  EXPECT_LE(page.size(), 5'000'000u);
  const nlohmann::json data = data_of(page);
  ASSERT_EQ(data.at("ranks").size(), 8u);
  for (const auto& rank : data.at("ranks")) {
    EXPECT_EQ(rank.at("steps").size(), 100u);
    EXPECT_GT(rank.at("joined_us"), 0);
    for (const auto& lane : rank.at("lanes"))
      EXPECT_EQ(unpacked(lane.at("spans").get<std::string>()).size() % 4, 0u);
  }
}

TEST(Page, OfAShortTraceJoinsNothing) {
  TraceFile file = long_trace(0, 3, 10);
  file.sections["engine"] = R"({"units": "</script><b>"})";
  std::vector<TraceAnalysis> ranks;
  ranks.emplace_back(file);
  const std::string page = html_of(ranks, {.read_bytes_per_second = 3e9});
  const nlohmann::json rank = data_of(page).at("ranks").at(0);
  EXPECT_EQ(rank.at("joined_us"), 0);
  EXPECT_EQ(rank.at("bandwidth").at("peak"), 3e9);
  std::size_t spans = 0;
  for (const auto& lane : rank.at("lanes")) {
    if (lane.at("name") == "compute")
      spans = unpacked(lane.at("spans").get<std::string>()).size() / 4;
  }
  EXPECT_EQ(spans, 30u);
  EXPECT_EQ(page.find("http://"), std::string::npos);
  EXPECT_EQ(page.find("https://"), std::string::npos);
  // Read bytes: 30 reads of 4 KiB, over the bins.
  double bytes = 0;
  for (const auto& rate : rank.at("bandwidth").at("read"))
    bytes += rate.get<double>() * rank.at("bandwidth").at("bin_us").get<double>() * 1e-6;
  EXPECT_NEAR(bytes, 30 * 4096, 30 * 4096 * 0.01);
}

// Steps of these lengths in ms, after one of 100 ms that is left out.
TraceFile steps_of(const std::vector<double>& lengths_ms) {
  std::vector<TraceRecord> records{span(TraceKind::kStep, 0, 100'000'000)};
  std::uint64_t at = 100'000'000;
  for (const double length : lengths_ms) {
    const auto end = at + static_cast<std::uint64_t>(length * 1e6);
    records.push_back(span(TraceKind::kStep, at, end));
    records.push_back(span(TraceKind::kCompute, at, end - 1'000'000, 0));
    at = end;
  }
  return trace_of(std::move(records));
}

TEST(Diff, TellsARegressionFromChance) {
  const TraceFile before = steps_of({10, 10.1, 9.9, 10, 10.05, 9.95});
  const TraceFile slower = steps_of({11, 11.1, 10.9, 11, 11.05, 10.95});
  const TraceFile noisy = steps_of({8, 15, 7, 14, 9, 13});
  const TraceFile one = steps_of({20});
  const TraceDiff diff = diff_of(TraceAnalysis(before), TraceAnalysis(slower));
  EXPECT_DOUBLE_EQ(diff.step.before_ms, 10);
  EXPECT_DOUBLE_EQ(diff.step.after_ms, 11);
  // Both have a standard error of sqrt(0.0049 / 6 ...): Welch with 10 degrees of freedom.
  EXPECT_NEAR(diff.step.margin_ms, 2.228 * std::sqrt(2 * 0.025 / 5 / 6), 1e-9);
  EXPECT_TRUE(diff.is_regression(9));
  EXPECT_FALSE(diff.is_regression(11));
  EXPECT_DOUBLE_EQ(diff.parts[0].difference_ms(), 1);  // compute
  EXPECT_FALSE(diff_of(TraceAnalysis(slower), TraceAnalysis(before)).is_regression(0));
  EXPECT_FALSE(diff_of(TraceAnalysis(before), TraceAnalysis(noisy)).is_regression(5));
  EXPECT_FALSE(diff_of(TraceAnalysis(before), TraceAnalysis(one)).is_regression(5));
}

TEST(Diff, ATraceWithoutAStepThatEndedIsRefused) {
  const TraceFile whole = steps_of({10, 11});
  TraceFile none = trace_of({span(TraceKind::kCompute, 0, 1'000'000, 0)});
  none.path = "none.trace";
  for (const bool is_first : {true, false}) {
    const std::string message = expect_error(ErrorCode::kInput, [&] {
      (void)(is_first ? diff_of(TraceAnalysis(none), TraceAnalysis(whole))
                      : diff_of(TraceAnalysis(whole), TraceAnalysis(none)));
    });
    EXPECT_NE(message.find("\"none.trace\""), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace sluice::test
