// The parts of the page, the exports and the comparison.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <span>
#include <utility>

#include <fmt/format.h>
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

// However long the run: it has the longest steps, and says what it leaves out.
TEST(Page, OfTwentyThousandStepsStaysSmall) {
  constexpr std::uint64_t kSteps = 20'000, kStepNs = 1'000'000;
  std::vector<TraceRecord> records;
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    const std::uint64_t at = step * 2 * kStepNs;
    const auto unit = static_cast<std::uint32_t>(step % 700);
    records.push_back(span(TraceKind::kStep, at, at + kStepNs + (step == 777 ? 900 : 0)));
    records.push_back(wait(TraceReason::kRead, at + 1000, at + 9000, unit));
    records.push_back(span(TraceKind::kAcquire, at - 3000, at - 2000, unit));
    records.back().detail = 2;  // an evaluation before the step
    for (std::uint64_t i = 0; i < 20; ++i)
      records.push_back(span(TraceKind::kCompute, at + 10'000 + i * 45'000 + step % 7919,
                             at + 40'000 + i * 45'000 + step % 7919, unit + i % 2));
    for (TraceRecord& record : std::span(records).last(23)) record.step = step;
  }
  const TraceFile file = trace_of(std::move(records));
  std::vector<TraceAnalysis> ranks;
  ranks.emplace_back(file);
  const std::string page = html_of(ranks, {});
  EXPECT_LE(page.size(), 5'000'000u);
  EXPECT_GE(page.size(), 2'000'000u);  // spans take the room that is left
  const nlohmann::json rank = data_of(page).at("ranks").at(0);
  const nlohmann::json& steps = rank.at("steps");
  ASSERT_EQ(steps.size(), 3000u);
  EXPECT_EQ(steps.front().at("step"), 1);
  EXPECT_EQ(steps.back().at("step"), kSteps);
  EXPECT_TRUE(std::ranges::any_of(steps, [](const auto& step) { return step.at("step") == 777; }));
  std::uint64_t last = 0, gap = 0;
  for (const auto& step : steps) {
    const auto number = step.at("step").get<std::uint64_t>();
    gap = std::max(gap, number - std::exchange(last, number));
  }
  EXPECT_LE(gap, kSteps / 1499 + 1);
  EXPECT_EQ(rank.at("evaluations").size(), 3000u);
  const auto head = rank.at("head").get<std::string>();
  EXPECT_NE(head.find("so that it stays small, this page has 3000 of 20000 steps (the longest, and "
                      "others at equal distances), 3000 of 19999 evaluations, 500 of 700 rows of "
                      "waits (the longest)"),
            std::string::npos)
      << head;
}

// Names and ranks are not thinned out like spans: names are left out, too many ranks are refused.
TEST(Page, OfManyUnitsAndRanksStaysSmall) {
  constexpr int kUnits = 4000;
  const auto engine_with = [&](const std::string& first_name) {
    std::string units;
    for (int i = 0; i < kUnits; ++i) {
      const std::string name = fmt::format("{}.{}.<lambda>.{:0>250}", first_name, i / 256, i);
      units += fmt::format(
          R"({}{{"name": "{}", "first_block": {}, "blocks": 1, "parameter_bytes": 1,
             "tensors": [{{"name": "{}.weight"}}]}})",
          i == 0 ? "" : ",", name, i, name);
    }
    return fmt::format(
        R"({{"processor": "p", "granted_cores": 1, "parameters": 1, "state_bytes": 1,
            "config": {{"optimizer": {{"overlap": "eager"}}, "run": {{"threads": 1}},
            "storage": {{"verify": "all"}}}}, "units": [{}],
            "parameter_tier": [[{}, "nvme"]], "record_tier": [[{}, "nvme"]],
            "memory": {{"device_bytes": 0, "device_budget_bytes": 0, "host_bytes": 0,
            "host_budget_bytes": 0, "nvme_bytes": 0, "lane_bytes": 0, "parameter_slots": 0,
            "parameter_slot_bytes": 0, "gradient_slots": 0, "gradient_slot_bytes": 0,
            "pools": []}}}})",
        units, kUnits, kUnits);
  };
  const auto page_of = [](const std::vector<std::string>& engines) {
    std::vector<TraceFile> files;
    for (std::size_t rank = 0; rank < engines.size(); ++rank) {
      files.push_back(long_trace(static_cast<std::uint32_t>(rank), 20, 20));
      files.back().sections["engine"] = engines[rank];
    }
    std::vector<TraceAnalysis> ranks;
    for (const TraceFile& file : files) ranks.emplace_back(file);
    return html_of(ranks, {});
  };
  const std::string page = page_of(std::vector(3, engine_with("model.layers")));
  EXPECT_LE(page.size(), 2'000'000u);  // the ranks have the same units
  const nlohmann::json data = data_of(page);
  const nlohmann::json& first = data.at("ranks").at(0);
  const nlohmann::json& shown = first.at("units");
  EXPECT_GT(shown.size(), 2000u);
  EXPECT_TRUE(shown.at(0).at("tensors").empty());
  const auto head = first.at("head").get<std::string>();
  EXPECT_NE(
      head.find(fmt::format("units without the names of their tensors, the first {} of {} units",
                            shown.size(), kUnits)),
      std::string::npos)
      << head;
  EXPECT_TRUE(data.at("ranks").at(2).at("units").is_null());

  std::vector<std::string> others;
  for (int i = 0; i < 6; ++i) others.push_back(engine_with(fmt::format("stages.{}.layers", i)));
  const std::string message = expect_error(ErrorCode::kInput, [&] { (void)page_of(others); });
  EXPECT_NE(message.find("give the files of fewer ranks"), std::string::npos) << message;
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

// Transfers behind the last step, such as those of a checkpoint, may be quicker than any of a step.
TEST(Page, BandwidthIsScaledByTheSteps) {
  TraceFile file = long_trace(0, 3, 10);
  std::uint64_t end_ns = 0;
  for (const TraceRecord& record : file.records) end_ns = std::max(end_ns, record.end_ns);
  file.records.push_back(transfer(TraceKind::kRead, 0, end_ns + 5'000'000, end_ns + 5'000'000,
                                  end_ns + 6'000'000, end_ns + 6'000'000));
  file.records.back().size_bytes = 1 << 30;
  std::vector<TraceAnalysis> ranks;
  ranks.emplace_back(file);
  const nlohmann::json bandwidth = data_of(html_of(ranks, {})).at("ranks").at(0).at("bandwidth");
  const auto rates = bandwidth.at("read").get<std::vector<double>>();
  const auto behind = static_cast<std::size_t>(static_cast<double>(rates.size()) * 0.8);
  EXPECT_GT(std::ranges::max(rates), 1e11);
  EXPECT_EQ(bandwidth.at("most_read").get<double>(),
            *std::ranges::max_element(rates.begin(),
                                      rates.begin() + static_cast<std::ptrdiff_t>(behind)));
  EXPECT_EQ(bandwidth.at("most_written"), 0);
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
  TraceFile killed = trace_of({span(TraceKind::kStep, 0, 1'000'000)});
  killed.open_step = 1;
  for (TraceFile* file : {&none, &killed}) {
    file->path = "none.trace";
    for (const bool is_first : {true, false}) {
      const std::string message = expect_error(ErrorCode::kInput, [&] {
        (void)(is_first ? diff_of(TraceAnalysis(*file), TraceAnalysis(whole))
                        : diff_of(TraceAnalysis(whole), TraceAnalysis(*file)));
      });
      EXPECT_NE(message.find("\"none.trace\""), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace sluice::test
