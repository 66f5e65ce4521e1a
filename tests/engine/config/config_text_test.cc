// A config that is written down and read back is the same config: every key that the engine reads.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <sluice/config.h>
#include <sluice/config_document.h>
#include <sluice/error.h>
#include "engine/config/config_text.h"
#include "tests/support/campaign.h"
#include "tests/support/random_run.h"

namespace sluice::test {
namespace {

using nlohmann::json;

// Each key with a value that is not its default.
const std::vector<std::pair<const char*, json>> kKeys = {
    {"/precision/parameters", "fp16"},
    {"/precision/gradients", "fp32"},
    {"/precision/loss_scale/static", 0.25},
    {"/precision/loss_scale/initial_power", 31},
    {"/precision/loss_scale/window", 7},
    {"/precision/loss_scale/hysteresis", 3},
    {"/precision/loss_scale/consecutive_hysteresis", true},
    {"/precision/loss_scale/minimum", 0.5},
    {"/optimizer/type", "lion"},
    {"/optimizer/state", "8bit"},
    {"/optimizer/rounding_seed", 11},
    {"/optimizer/beta1", 0.1},
    {"/optimizer/beta2", 0.2},
    {"/optimizer/epsilon", 1e-3},
    {"/optimizer/momentum", 0.3},
    {"/optimizer/weight_decay", 0.4},
    {"/optimizer/groups", json::parse(R"([{"tensors": ["a.*", "b"], "learning_rate_factor": 0.1},
        {"tensors": ["c"], "learning_rate_factor": 1.0, "weight_decay": 0.0}])")},
    {"/optimizer/clip_norm", 0.7},
    {"/optimizer/clip_epsilon", 1e-6},
    {"/optimizer/non_finite", "skip"},
    {"/optimizer/untouched", "lazy"},
    {"/optimizer/lazy_max", 77},
    {"/optimizer/overlap", "speculative"},
    {"/optimizer/update_on", "device"},
    {"/optimizer/lanes", 5},
    {"/memory/device", "12345"},
    {"/memory/host", "67890"},
    {"/memory/check", "warn"},
    {"/memory/save_buffers", 3},
    {"/memory/unified", "off"},
    {"/memory/guard", "on"},
    {"/placement/parameters", "nvme"},
    {"/placement/optimizer", "host"},
    {"/placement/gradients", "device"},
    {"/activations", "recompute"},
    {"/storage/paths", {"/a", "/b"}},
    {"/storage/weights", {1.5}},
    {"/storage/calibration", "drives.json"},
    {"/storage/backend", "threads"},
    {"/storage/queue_depth", 9},
    {"/storage/verify", "sample"},
    {"/storage/state/name", "mine"},
    {"/storage/state/commit_every", 4},
    {"/storage/timeout", 11.5},
    {"/storage/block_elements", 8192},
    {"/sharding/stage", 1},
    {"/sharding/group", "node"},
    {"/sharding/keep_gathered", "0"},
    {"/sharding/reduction", "nccl"},
    {"/sharding/node_ranks", 4},
    {"/sharding/timeout", 0.5},
    {"/run/threads", 3},
};

json written(const std::string& text) {
  return json::parse(config_text(engine_config(ConfigDocument(text, "test"))));
}

TEST(ConfigText, HasEveryKeyThatTheEngineReads) {
  std::set<std::string> listed;
  for (const auto& [key, value] : kKeys) {
    json document;
    document[json::json_pointer(key)] = value;
    EXPECT_EQ(written(document.dump()).value(json::json_pointer(key), json()), value) << key;
    const json without = written("{}");
    EXPECT_NE(without.value(json::json_pointer(key), json()), value) << key << " is its default";
    listed.insert(key);
  }
  // One that is written without being listed would not be looked at.
  json all = written(R"({"optimizer": {"lanes": 1}, "storage": {"block_elements": 4096},
                         "run": {"threads": 1}})");
  all["optimizer"]["groups"] = 1;
  all["storage"]["paths"] = all["storage"]["weights"] = 1;
  const json flat = all.flatten();
  for (const auto& [key, value] : flat.items()) EXPECT_TRUE(listed.contains(key)) << key;
}

TEST(ConfigText, IsReadBackToTheSameConfig) {
  for (const std::uint64_t seed : seeds_of(campaign(200))) {
    RandomRun run(seed);
    Config config = run.config();
    config.optimizer.adam.beta2 = 1 - 1.0 / static_cast<double>(2 + run.below(1'000'000));
    if (run.one_in(2)) config.memory.host_bytes = run.any_magnitude(1e15);
    const std::string text = config_text(config);
    EXPECT_EQ(config_text(engine_config(ConfigDocument(text, "text"))), text) << "seed " << seed;
  }
}

TEST(ConfigText, SizesWithoutALimitAreTheLargestOfAFile) {
  Config config;
  config.memory.host_bytes = config.memory.device_bytes = UINT64_MAX;
  config.sharding.keep_gathered_bytes = UINT64_MAX;
  validate(config);
  const Config read = engine_config(ConfigDocument(config_text(config), "text"));
  EXPECT_EQ(read.memory.host_bytes, std::uint64_t{INT64_MAX});
  EXPECT_EQ(read.memory.device_bytes, std::uint64_t{INT64_MAX});
  EXPECT_EQ(read.sharding.keep_gathered_bytes, std::uint64_t{INT64_MAX});
}

// A trace has the config's text, which `sluice trace whatif` reads.
TEST(ConfigText, WhatCannotBeReadBackIsRefusedBeforehand) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<std::pair<const char*, std::function<void(Config&)>>> changes = {
      {"clip_norm", [](Config& c) { c.optimizer.clip_norm = kInfinity; }},
      {"clip_norm", [](Config& c) { c.optimizer.clip_norm = 1e39; }},
      {"optimizer.weight_decay", [](Config& c) { c.optimizer.adam.weight_decay = 11; }},
      {"epsilon", [](Config& c) { c.optimizer.adam.epsilon = 2; }},
      {"lazy_max", [](Config& c) { c.optimizer.lazy_max = 100'001; }},
      {"rounding_seed", [](Config& c) { c.optimizer.rounding_seed = (1ull << 53) + 2; }},
      {"commit_every", [](Config& c) { c.storage.state.commit_every = 1'000'001; }},
      {"window", [](Config& c) { c.precision.loss_scale.window = 1'000'000'001; }},
      {"hysteresis", [](Config& c) { c.precision.loss_scale.hysteresis = 1'000'001; }},
      {"group", [](Config& c) { c.sharding.group_ranks = 65'537; }},
      {"node_ranks", [](Config& c) { c.sharding.node_ranks = 65'537; }},
      {"learning_rate_factor",
       [](Config& c) { c.optimizer.groups = {{.tensors = {"a"}, .learning_rate_factor = 1001}}; }},
      {"weight_decay",
       [](Config& c) { c.optimizer.groups = {{.tensors = {"a"}, .weight_decay = 11}}; }},
      {"group_ranks",
       [](Config& c) {
         c.sharding.group_ranks = 2;
         c.sharding.group_is_node = true;
       }},
      {"storage.paths", [](Config& c) { c.storage.paths = {std::string("/tmp\0x", 6)}; }},
      {"precision.parameters", [](Config& c) { c.precision.parameters = DType(99); }},
      {"placement.parameters", [](Config& c) { c.placement.parameters = TierChoice(99); }},
      {"optimizer.type", [](Config& c) { c.optimizer.kind = OptimizerKind(99); }},
      {"non_finite", [](Config& c) { c.optimizer.non_finite = NonFinitePolicy(99); }},
      {"update_on", [](Config& c) { c.optimizer.update_on = UpdateProcessor(99); }},
      {"reduction", [](Config& c) { c.sharding.reduction = RankReduction(99); }},
      {"overlap", [](Config& c) { c.optimizer.overlap = OverlapPolicy(99); }},
      {"verify", [](Config& c) { c.storage.verify = Verify(99); }}};
  for (const auto& [member, change] : changes) {
    Config config;
    change(config);
    try {
      validate(config);
      ADD_FAILURE() << member << " passes";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kConfig);
      EXPECT_NE(std::string(error.what()).find(member), std::string::npos) << error.what();
      EXPECT_TRUE(std::string(error.what()).starts_with("Config::")) << error.what();
    }
  }
}

}  // namespace
}  // namespace sluice::test
