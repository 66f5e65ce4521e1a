// Predictions from traces whose steps are set by hand to what the model makes of them: when the
// model is trusted, and that what it predicts is a time.
#include "tools/trace/trace_whatif.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <regex>
#include <string>

#include <nlohmann/json.hpp>

#include <sluice/units.h>
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"
#include "tools/trace/trace_steps.h"

namespace sluice::test {
namespace {

class WhatIfTest : public testing::Test {
 protected:
  WhatIfTest() {
    Config config = toy_config(directory_.path());
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config.memory.device_bytes = 400_KiB;
    config.memory.host_bytes = 2_MiB;
    config.optimizer.overlap = OverlapPolicy::kDeferred;
    // On a loaded machine, what the model makes of a run may depend on how long its steps are said
    // to be. Such a run is made again.
    for (int run = 0; run < 20; ++run) {
      record(config);
      if (keeps_its_time()) break;
    }
  }

  void record(const Config& config) {
    const std::string path = directory_.path() + "/toy.trace";
    trace_start({.file = path});
    (void)run_toy(config, {.steps = 5});
    (void)trace_stop();
    file_ = read_trace(path);
    // As long as computation takes alone is a length that the model explains, at least.
    const StepMeans means = means_of(steady_steps(TraceAnalysis(file_)));
    replayed_s_ = replayed(means.total_s);
  }

  bool keeps_its_time() const {
    for (const double error : {-0.24, 0.24}) {
      try {
        const TraceFile file = with_steps_of(replayed_s_ / (1 + error));
        if (std::abs(what_if(TraceAnalysis(file), {}).error() - error) > 5e-4) return false;
      } catch (const Error&) {
        return false;
      }
    }
    return true;
  }

  // The same trace, all of its steps that long.
  TraceFile with_steps_of(double step_s) const {
    TraceFile file = file_;
    for (TraceRecord& record : file.records) {
      if (record.kind == TraceKind::kStep)
        record.end_ns = record.begin_ns + static_cast<std::uint64_t>(step_s * 1e9);
    }
    return file;
  }

  // A length of the steps, near this one, that the model explains. Its time of the step
  // may depend on it.
  double explained(double step_s) const {
    for (double length_s = step_s;; length_s *= 1.02) {
      for (const double found_s : {length_s, step_s * step_s / length_s}) {
        try {
          (void)what_if(TraceAnalysis(with_steps_of(found_s)), {});
          return found_s;
        } catch (const Error&) {
          if (length_s > 10 * step_s) throw;
        }
      }
    }
  }

  // The model's time of the recorded step.
  double replayed(double step_s) const {
    return what_if(TraceAnalysis(with_steps_of(explained(step_s))), {}).replayed.step_s;
  }

  const TempDirectory directory_;
  TraceFile file_;
  double replayed_s_ = 0;
};

TEST_F(WhatIfTest, AModelThatIsFarOffPredictsNothing) {
  for (const double error : {-0.24, -0.1, 0.0, 0.1, 0.24}) {
    const TraceFile file = with_steps_of(replayed_s_ / (1 + error));
    const TraceAnalysis analysis(file);
    const WhatIf same = what_if(analysis, {});
    EXPECT_NEAR(same.error(), error, 1e-3);
    EXPECT_NEAR(same.predicted_s, same.measured_s, 1e-6 * same.measured_s);
    // However much faster everything gets, a step takes time, and no more than before.
    const WhatIf fast =
        what_if(analysis, {"compute=1000x", "nvme=1000x", "copy=1000x", "adam=1000x"});
    EXPECT_GT(fast.predicted_s, 0);
    EXPECT_LT(fast.predicted_s, same.predicted_s);
  }
  for (const double error : {-0.5, -0.26, 0.26, 0.954, 10.0}) {
    const TraceFile file = with_steps_of(replayed_s_ / (1 + error));
    const std::string message = expect_error(
        ErrorCode::kInput, [&] { (void)what_if(TraceAnalysis(file), {"compute=4x"}); });
    EXPECT_NE(message.find("where at most 25 % is good enough"), std::string::npos) << message;
  }
}

TEST_F(WhatIfTest, UnitsThatStepsAnnounceAreRefused) {
  TraceFile file = with_steps_of(replayed_s_);
  std::string& engine = file.sections.at("engine");
  for (const char* const order : {"\"forward_order\":[", "\"backward_order\":["}) {
    const std::size_t begin = engine.find(order);
    ASSERT_NE(begin, std::string::npos);
    const std::size_t end = engine.find(']', begin);
    const std::string units = engine.substr(begin, end - begin);
    std::string fewer = order;
    for (const char unit : {'0', '1', '2', '3', '4'})  // 5 is in no order
      fewer += std::string(fewer.back() == '[' ? "" : ",") + unit;
    engine.replace(begin, units.size(), fewer);
  }
  const std::string flag = "\"announced\":false";
  engine.replace(engine.rfind(flag), flag.size(), "\"announced\":true");
  const std::string message =
      expect_error(ErrorCode::kInput, [&] { (void)what_if(TraceAnalysis(file), {}); });
  EXPECT_NE(message.find("1 of its 6 units, such as \""), std::string::npos) << message;
  EXPECT_NE(message.find("are announced"), std::string::npos) << message;
}

// Skipped steps have the number of the step after them; each has its own uses.
TEST_F(WhatIfTest, SkippedStepsChangeNoTimeOfAUnit) {
  TraceFile file = with_steps_of(replayed_s_);
  const std::vector<UnitTime> units = what_if(TraceAnalysis(file), {}).rates.units;
  for (TraceRecord& record : file.records)
    record.step = record.step <= 3 ? std::min<std::uint64_t>(record.step, 1) : record.step - 2;
  const WhatIf skipped = what_if(TraceAnalysis(file), {});
  ASSERT_EQ(skipped.rates.units.size(), units.size());
  for (std::size_t i = 0; i < units.size(); ++i) {
    EXPECT_EQ(skipped.rates.units[i].forward_s, units[i].forward_s);
    EXPECT_EQ(skipped.rates.units[i].backward_s, units[i].backward_s);
  }
  EXPECT_EQ(skipped.left_out,
            std::vector<std::string>{"2 of 4 steps: skipped ones, and those right after them"});
}

// Settings that no run may have are refused in the engine's words. A factor of an unknown latency
// would change nothing.
TEST_F(WhatIfTest, SettingsThatNoRunHasAreRefused) {
  const TraceFile file = with_steps_of(replayed_s_);
  const TraceAnalysis analysis(file);
  const auto said = [&](const TraceAnalysis& of, const char* setting) {
    return expect_error(ErrorCode::kConfig, [&] { (void)what_if(of, {setting}); });
  };
  EXPECT_NE(said(analysis, "policy=eager").find("clip_norm"), std::string::npos);
  EXPECT_NE(said(analysis, "lanes=100000").find("optimizer.lanes"), std::string::npos);
  for (const char* setting : {"lanes=0.5", "lanes=3.9", "prefetch_window=0.5"}) {
    const std::string message = said(analysis, setting);
    EXPECT_NE(message.find(setting), std::string::npos) << message;
    EXPECT_NE(message.find("is not a whole number"), std::string::npos) << message;
  }
  // Reads and writes of one plane have one size, from which no latency can be told.
  TraceFile one_plane = file;
  std::erase_if(one_plane.records, [](const TraceRecord& record) {
    return record.kind <= TraceKind::kWrite && record.detail == kTraceParameters;
  });
  EXPECT_NE(said(TraceAnalysis(one_plane), "nvme.latency=10x").find("does not show the latency"),
            std::string::npos);
}

TEST_F(WhatIfTest, StepsThatTookNoTimeAreRefused) {
  const TraceFile file = with_steps_of(0);
  const std::string message =
      expect_error(ErrorCode::kInput, [&] { (void)what_if(TraceAnalysis(file), {}); });
  EXPECT_NE(message.find("took no time"), std::string::npos) << message;
}

// One rank's trace knows of the others how long it waited for them: here a tenth of each step.
TEST_F(WhatIfTest, TheTraceOfOneRankSaysWhatItLeavesOut) {
  TraceFile file = with_steps_of(replayed_s_);
  EXPECT_EQ(what_if(TraceAnalysis(file), {}).left_out, std::vector<std::string>());
  file.rank = 1;
  file.ranks = 3;
  std::erase_if(file.records,
                [](const TraceRecord& record) { return record.kind == TraceKind::kWait; });
  std::vector<TraceRecord> waits;
  for (const TraceRecord& record : file.records) {
    if (record.kind != TraceKind::kStep) continue;
    waits.push_back(record);
    waits.back().kind = TraceKind::kWait;
    waits.back().reason = TraceReason::kCollective;
    waits.back().end_ns = record.begin_ns + (record.end_ns - record.begin_ns) / 10;
  }
  file.records.insert(file.records.end(), waits.begin(), waits.end());
  const std::string said = text_of(what_if(TraceAnalysis(file), {"nvme=2x"}));
  std::smatch found;
  ASSERT_TRUE(std::regex_search(
      said, found,
      std::regex(
          "left out: rank 1 of 3 alone, with its share of the state: gathers, reductions and "
          "waiting for other ranks \\((\\d+\\.\\d{3}) ms per step\\) stay as they were")))
      << said;
  EXPECT_NEAR(std::stod(found[1]), 100 * replayed_s_, 0.002) << said;
}

// A commit writes the state that is at home in memory.
TEST_F(WhatIfTest, CommitsAreAsRareAsInTheRun) {
  nlohmann::json engine = nlohmann::json::parse(file_.sections.at("engine"));
  nlohmann::json& config = engine["config"];
  config["placement"] = {{"parameters", "host"}, {"optimizer", "host"}};
  config["memory"]["host"] = "256MiB";
  const auto step_s = [&](std::uint32_t commit_every) {
    config["storage"]["state"] = {{"name", "run"}, {"commit_every", commit_every}};
    file_.sections["engine"] = engine.dump();
    // Where the drive binds, however slow this build computes.
    const WhatIf found = what_if(TraceAnalysis(with_steps_of(explained(replayed_s_))),
                                 {"compute=1000x", "copy=1000x", "adam=1000x"});
    return found.predicted_s / found.measured_s * found.replayed.step_s;
  };
  const double each_s = step_s(1);
  EXPECT_LT(step_s(4), each_s);
}

// A smaller budget drives the state to storage, where "auto" speculates.
TEST_F(WhatIfTest, AutoComesToThePolicyOfTheChangedPlan) {
  nlohmann::json engine = nlohmann::json::parse(file_.sections.at("engine"));
  nlohmann::json& config = engine["config"];
  config["placement"] = {{"parameters", "nvme"}, {"optimizer", "auto"}, {"gradients", "host"}};
  config["optimizer"]["overlap"] = "auto";
  config["memory"]["host"] = "256MiB";
  file_.sections["engine"] = engine.dump();
  std::uint64_t last_ns = 0;
  for (const TraceRecord& record : file_.records) last_ns = std::max(last_ns, record.end_ns);
  for (TraceRecord& record : file_.records) {  // updates after the norm, as of deferral
    if (record.kind != TraceKind::kAdam) continue;
    record.begin_ns += last_ns;
    record.end_ns += last_ns;
  }
  const TraceFile file = with_steps_of(explained(replayed_s_));
  const TraceAnalysis analysis(file);
  EXPECT_EQ(what_if(analysis, {}).policy, OverlapPolicy::kDeferred);
  EXPECT_EQ(what_if(analysis, {"memory.host=128MiB"}).changed_policy, OverlapPolicy::kDeferred);
  const auto fits = [&](const std::string& budget) {
    try {
      (void)what_if(analysis, {budget});
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
      return false;
    }
  };
  int least_kib = 64;
  const auto budget = [&] { return "memory.host=" + std::to_string(least_kib) + "KiB"; };
  while (least_kib < 4096 && !fits(budget())) least_kib += 32;
  const WhatIf small = what_if(analysis, {budget()});
  EXPECT_EQ(small.changed_policy, OverlapPolicy::kSpeculative);
  EXPECT_NE(text_of(small).find(" % (speculative)\n"), std::string::npos) << text_of(small);
  const WhatIf named = what_if(analysis, {budget(), "policy=speculative"});
  EXPECT_EQ(small.predicted_s, named.predicted_s);
  const WhatIf deferred = what_if(analysis, {budget(), "policy=deferred"});
  EXPECT_EQ(deferred.changed_policy, OverlapPolicy::kDeferred);
  EXPECT_NE(small.predicted_s, deferred.predicted_s);
}

// A description that asks for more than any run has is refused before anything is planned for it.
TEST_F(WhatIfTest, RefusesImplausibleDescriptions) {
  const nlohmann::json engine = nlohmann::json::parse(file_.sections.at("engine"));
  const auto refuse = [&](const char* place, const nlohmann::json& value) {
    nlohmann::json changed = engine;
    changed[nlohmann::json::json_pointer(place)] = value;
    TraceFile file = file_;
    file.sections["engine"] = changed.dump();
    const std::string message =
        expect_error(ErrorCode::kInput, [&] { (void)what_if(TraceAnalysis(file), {}); });
    EXPECT_NE(message.find("damaged"), std::string::npos) << place << ": " << message;
  };
  constexpr std::uint64_t kHuge = std::uint64_t{1} << 63;
  refuse("/units/0/tensors/0/elements", kHuge);
  refuse("/units/0/tensors/0/elements", std::uint64_t{1} << 47);  // in blocks of a few Ki
  refuse("/units/0/tensors/0/elements", -1);
  refuse("/units/0/tensors/0/elements", 1.5);
  refuse("/block_elements", kHuge);
  refuse("/shard/count", 0);
  refuse("/shard/count", kHuge);
  refuse("/shard/index", 1);
  refuse("/concurrent_leases", kHuge);
  refuse("/forward_order", nlohmann::json::array());
  refuse("/forward_order/0", -1);
  refuse("/config/precision/parameters", "fp7");
  refuse("/config/optimizer/type", 5);
  refuse("/config/placement/parameters", "tape");
  refuse("/config/optimizer/lanes", kHuge);
  refuse("/config/memory/host", "1000000TiB");
  refuse("/config/memory/device", "auto");
  refuse("/config/activations", 4);
  refuse("/micro_batches", kHuge);
  refuse("/ranks", 0);
}

}  // namespace
}  // namespace sluice::test
