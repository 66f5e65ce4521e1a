// The description of a run in its durable store's records.
#include <gtest/gtest.h>

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "engine/store/commit_format.h"
#include "engine/store/durable_identity.h"
#include "tests/support/expect_error.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

// Such a store has no word of its state, and its hash is that of a model with fp32 moments.
TEST(DurableIdentity, AStoreOfAnOlderVersionHasFp32Moments) {
  const ModelSpec model = validated(toy_model());
  Config eight;
  eight.storage.block_elements = 4096;
  const Layout layout(model, state_format(eight), 4096);
  const DurableIdentity fp32(eight, model, layout, 1);
  eight.optimizer.state = OptimizerState::k8bit;
  const DurableIdentity codes(eight, model, layout, 1);
  std::string settings = fp32.settings();
  const std::string word = "\"optimizer.state\":\"fp32\",";
  ASSERT_NE(settings.find(word), std::string::npos) << settings;
  settings.erase(settings.find(word), word.size());
  EXPECT_NE(fp32.layout_hash(), codes.layout_hash());
  const auto obstacle = [&](const DurableIdentity& identity) {
    return identity.obstacle(fp32.model_hash(), fp32.layout_hash(), settings);
  };
  EXPECT_EQ(obstacle(fp32), "");
  EXPECT_NE(obstacle(codes).find("optimizer.state was fp32 and is 8bit"), std::string::npos)
      << obstacle(codes);
  EXPECT_EQ(described_run(settings, "old").config.optimizer.state, OptimizerState::kFp32);
  EXPECT_EQ(described_run(codes.settings(), "new").config.optimizer.state, OptimizerState::k8bit);
}

TEST(DurableIdentity, KnowsTheSeedWithWhichMomentsAreRounded) {
  const ModelSpec model = validated(toy_model());
  Config config;
  config.optimizer.state = OptimizerState::kBf16;
  config.optimizer.rounding_seed = 5;
  const Layout layout(model, state_format(config), 4096);
  const DurableIdentity saved(config, model, layout, 1);
  const DescribedRun run = described_run(saved.settings(), "a store");
  EXPECT_EQ(run.config.optimizer.state, OptimizerState::kBf16);
  EXPECT_EQ(run.config.optimizer.rounding_seed, 5u);
  config.optimizer.rounding_seed = 6;
  const DurableIdentity other(config, model, layout, 1);
  EXPECT_EQ(other.changes(saved.settings()),
            std::vector<std::string>{"optimizer.rounding_seed was 5 and is 6"});
}

TEST(DurableIdentity, KnowsTheOrderInWhichRanksAdd) {
  const ModelSpec model = validated(toy_model());
  const Config exact;
  Config nodes;
  nodes.sharding.reduction = RankReduction::kNodes;
  nodes.sharding.node_ranks = 2;
  const Layout layout(model, state_format(exact), 4096);
  const DurableIdentity of_exact(exact, model, layout, 4);
  const DurableIdentity of_nodes(nodes, model, layout, 4);
  const auto obstacle = [](const DurableIdentity& identity, const DurableIdentity& saved) {
    return identity.obstacle(saved.model_hash(), saved.layout_hash(), saved.settings());
  };
  EXPECT_EQ(obstacle(of_nodes, of_nodes), "");
  EXPECT_NE(obstacle(of_nodes, of_exact).find("sharding.reduction was exact and is nodes"),
            std::string::npos);
  EXPECT_NE(obstacle(of_exact, of_nodes).find("sharding.reduction was nodes and is exact"),
            std::string::npos)
      << obstacle(of_exact, of_nodes);
  const DescribedRun described = described_run(of_nodes.settings(), "a store");
  EXPECT_EQ(described.config.sharding.reduction, RankReduction::kNodes);
  EXPECT_EQ(described.config.sharding.node_ranks, 2u);
  // One node alone adds as one level does.
  nodes.sharding.node_ranks = 4;
  EXPECT_EQ(obstacle(DurableIdentity(nodes, model, layout, 4), of_exact), "");
}

// Returns the settings of a record without these keys, as an older version wrote it.
std::string without(const std::string& settings, const std::vector<std::string>& keys) {
  nlohmann::json document = nlohmann::json::parse(settings);
  for (const std::string& key : keys) EXPECT_EQ(document["config"].erase(key), 1u) << key;
  return document.dump();
}

class ChangedNumbers : public testing::Test {
 protected:
  DurableIdentity identity(std::uint32_t ranks = 1) const {
    const ModelSpec model = validated(model_);
    return {config_, model, Layout(model, state_format(config_), 4096), ranks};
  }
  using Lines = std::vector<std::string>;

  Config config_;
  ModelSpec model_ = toy_model();
};

TEST_F(ChangedNumbers, ClippingAndWhatAGradientThatIsNotFiniteLeadsTo) {
  const std::string saved = identity().settings();
  config_.optimizer.clip_epsilon = 0.01;
  EXPECT_EQ(identity().changes(saved), Lines{"optimizer.clip_epsilon was 0 and is 0.01"});
  config_.optimizer.non_finite = NonFinitePolicy::kSkip;
  const Lines both{"optimizer.clip_epsilon was 0 and is 0.01",
                   "optimizer.non_finite was stop and is skip"};
  EXPECT_EQ(identity().changes(saved), both);
  // An older version has not said what they were.
  EXPECT_EQ(identity().changes(without(saved, {"optimizer.clip_epsilon", "optimizer.non_finite",
                                               "tensors with weight decay"})),
            Lines{});
}

TEST_F(ChangedNumbers, OnlyThoseThatHaveAnEffect) {
  config_.optimizer.clip_norm = 0;
  const std::string unclipped = identity().settings();
  config_.optimizer.clip_epsilon = 0.01;
  EXPECT_EQ(identity().changes(unclipped), Lines{});
  config_.precision.parameters = config_.precision.gradients = DType::kFp16;
  config_.precision.loss_scale.static_scale = 0;
  const std::string moving = identity().settings();
  config_.optimizer.non_finite = NonFinitePolicy::kSkip;
  EXPECT_EQ(identity().changes(moving), Lines{});
}

TEST_F(ChangedNumbers, TensorsWithWeightDecayAndTheirReduction) {
  const std::string saved = identity(4).settings();
  config_.sharding.reduction = RankReduction::kNccl;
  EXPECT_EQ(identity(4).changes(saved), Lines{"sharding.reduction was exact and is nccl"});
  EXPECT_EQ(identity(4).changes(without(saved, {"sharding.reduction"})), Lines{});
  EXPECT_EQ(identity(1).changes(identity(1).settings()), Lines{});
  config_.sharding.reduction = RankReduction::kExact;
  model_.units[0].tensors[0].weight_decay = WeightDecay::kNone;
  const Lines changes = identity(4).changes(saved);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_NE(changes[0].find("tensors with weight decay was "), std::string::npos) << changes[0];
}

class LongSettings : public ChangedNumbers {
 protected:
  static std::string text_of(const Config::Optimizer::Group& group) {
    return fmt::format("{} {} {}", fmt::join(group.tensors, " "), group.learning_rate_factor,
                       group.weight_decay.value_or(-1));
  }
  void name_many(std::size_t count, double weight_decay) {
    Config::Optimizer::Group& group =
        config_.optimizer.groups.emplace_back(Config::Optimizer::Group{});
    for (std::size_t i = 0; i < count; ++i)
      group.tensors.push_back(fmt::format("layers.{}.experts.down_proj.weight", i));
    group.weight_decay = weight_decay;
  }
};

TEST_F(LongSettings, AGroupOfManyTensorsHasAHash) {
  name_many(30'000, 0.1);
  const std::string saved = identity().settings();
  EXPECT_LT(saved.size(), 20'000u);
  EXPECT_EQ(identity().changes(saved), Lines{});
  // An older version has written all names.
  nlohmann::json whole = nlohmann::json::parse(saved);
  whole["config"]["optimizer.groups[0]"] = text_of(config_.optimizer.groups[0]);
  EXPECT_GT(whole.dump().size(), 1'000'000u);
  EXPECT_EQ(identity().changes(whole.dump()), Lines{});
  config_.optimizer.groups[0].weight_decay = 0.2;
  for (const std::string& before : {saved, whole.dump()}) {
    const Lines changes = identity().changes(before);
    ASSERT_EQ(changes.size(), 1u);
    EXPECT_TRUE(changes[0].ends_with(" and weight_decay 0.2")) << changes[0];
    EXPECT_NE(changes[0].find("with learning_rate_factor 1 and weight_decay 0.1 and is \"names of "
                              "hash "),
              std::string::npos)
        << changes[0];
    EXPECT_LT(changes[0].size(), 300u);
  }
  config_.optimizer.groups[0].tensors.back() += "s";
  EXPECT_EQ(identity().changes(identity().settings()), Lines{});
  EXPECT_EQ(identity().changes(saved).size(), 1u);
}

TEST_F(LongSettings, ShortGroupsHaveTheirNames) {
  name_many(3, 0.1);
  const std::string text = text_of(config_.optimizer.groups[0]);
  EXPECT_NE(identity().settings().find(text), std::string::npos);
  for (int i = 0; i < 2000; ++i) name_many(3, 0.001 * i);
  EXPECT_EQ(identity().settings().find(text), std::string::npos);
  EXPECT_EQ(identity().changes(identity().settings()), Lines{});
}

TEST_F(LongSettings, AConfigWithoutRoomIsRefused) {
  for (int i = 0; i < 20'000; ++i) name_many(2, 0.001 * i);
  const std::string said = expect_error(ErrorCode::kUnsupported, [&] { (void)identity(); });
  EXPECT_NE(said.find("room for 1024 KiB of settings, but those of this config take "),
            std::string::npos)
      << said;
  EXPECT_NE(said.find("it has 20000 optimizer.groups; merge groups"), std::string::npos) << said;
}

TEST_F(LongSettings, AcceptedChangesStayShort) {
  config_.optimizer.clip_norm = 3000;
  nlohmann::json many = nlohmann::json::parse(identity().settings());
  for (int i = 1; i < 3000; ++i)
    many["changes"].push_back(
        {{"step", i}, {"change", fmt::format("optimizer.clip_norm was {} and is {}", i, i + 1)}});
  config_.optimizer.clip_norm = 2999.5;
  const DurableIdentity after = identity();
  const std::string settings = after.settings(after.accepted_changes(many.dump(), 3000));
  EXPECT_LT(settings.size(), 160'000u);
  const nlohmann::json changes = nlohmann::json::parse(settings)["changes"];
  EXPECT_GT(changes.size(), 900u);
  EXPECT_EQ(changes.back()["step"], 3000);
  EXPECT_EQ(changes.back()["change"], "optimizer.clip_norm was 3000 and is 2999.5");
  EXPECT_EQ(changes[changes.size() - 2]["step"], 2999);
  // One of an older version.
  nlohmann::json old = nlohmann::json::parse(settings);
  old["changes"] = {{{"step", 7}, {"change", std::string(900'000, 'x')}}};
  config_.optimizer.clip_norm = 0.25;
  const DurableIdentity next = identity();
  const nlohmann::json kept = nlohmann::json::parse(next.accepted_changes(old.dump(), 8));
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[0]["step"], 7);
  EXPECT_EQ(kept[0]["change"], "the text of this change was too long, and is left out");
  EXPECT_EQ(kept[1]["change"], "optimizer.clip_norm was 2999.5 and is 0.25");
}

TEST_F(LongSettings, UnitsLeaveRoomForTheRest) {
  for (std::size_t i = 0; i < 8'000; ++i)
    model_.units[0].tensors.push_back(
        {.name = fmt::format("a tensor with a name of some length, number {}", i), .shape = {1}});
  EXPECT_NE(identity().settings().find("\"units\":[["), std::string::npos);
  for (int i = 0; i < 9'000; ++i) name_many(2, 0.001 * i);
  const std::string settings = identity().settings();
  EXPECT_LE(settings.size(), kSettingsBytesMax);
  EXPECT_EQ(settings.find("\"units\":[["), std::string::npos);
  EXPECT_EQ(identity().changes(settings), Lines{});
}

}  // namespace
}  // namespace sluice::test
