// The description of a run in its durable store's records.
#include <gtest/gtest.h>

#include "engine/store/durable_identity.h"
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

}  // namespace
}  // namespace sluice::test
