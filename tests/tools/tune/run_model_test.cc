// From five bad configs the search reaches a grid over five keys, under the model at made rates;
// and what the model must know: batch, activations, budgets, homes.
#include "tools/tune/run_model.h"

#include <array>
#include <utility>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "tools/tune/tune_axes.h"

namespace sluice {
namespace {

// A drive that needs large requests and several in flight, beside computation of `unit_s` a unit.
MachineCalibration drive() {
  MachineCalibration machine{.hardware = "made", .took_s = 1};
  for (const IoPattern pattern : {IoPattern::kRead, IoPattern::kWrite, IoPattern::kMixed}) {
    for (const std::uint64_t size : {64u << 10, 1u << 20, 16u << 20}) {
      for (const std::uint32_t depth : {1u, 8u, 32u}) {
        const double by_size = size >> 20 == 0 ? 0.3 : size >> 20 == 1 ? 0.8 : 1;
        const double by_depth = depth == 1 ? 0.4 : depth == 8 ? 0.9 : 1;
        machine.drives.push_back({.pattern = pattern,
                                  .request_bytes = size,
                                  .depth = depth,
                                  .bytes_per_second = 1e9 * by_size * by_depth});
      }
    }
  }
  machine.adam_parameters_per_second = 1e9;
  return machine;
}

std::string config_text(const nlohmann::json& changes) {
  nlohmann::json config = {
      {"model",
       {{"layers", 8},
        {"heads", 4},
        {"embedding", 512},
        {"context", 64},
        {"vocabulary", 1024},
        {"tied_head", false}}},
      {"batch", {{"sequences", 2}, {"micro_batches", 8}}},
      {"activations", "recompute"},
      {"memory", {{"device", "48MiB"}, {"host", "160MiB"}}},
      {"placement", {{"parameters", "auto"}, {"optimizer", "auto"}}},
      {"storage", {{"paths", {"/"}}, {"block_elements", 262144}, {"queue_depth", 32}}},
      {"optimizer", {{"lanes", 8}}},
      {"run", {{"device", "host"}, {"threads", 2}}}};
  config.merge_patch(changes);
  return config.dump();
}

class Tuned {
 public:
  explicit Tuned(nlohmann::json changes = nlohmann::json::object(), Rates rates = {})
      : document_(config_text(changes), "a test"), model_(document_, drive(), {}) {
    Trial trial;
    trial.step_s = {1};
    trial.rates = std::move(rates);
    trial.rates.units.assign(10, {.forward_s = 2e-3, .backward_s = 6e-3});
    model_.learn(trial, model_.given());
  }

  const RunModel& model() const { return model_; }
  std::vector<TuneAxis> axes(const std::vector<std::string>& kept = {}) const {
    return tune_axes(document_, model_.given(), drive(), kept);
  }
  TuneResult search(const std::vector<std::string>& kept = {}) const {
    return tune_search(
        axes(kept), [this](const TuneSettings& settings) { return model_.predict(settings); }, 3);
  }

 private:
  ConfigDocument document_;
  RunModel model_;
};

double step_s(const Tuned& tuned, const TuneSettings& settings) {
  const TunePrediction prediction = tuned.model().predict(settings);
  return prediction.obstacle.empty() ? prediction.step_s : 1e9;
}

// The best of all combinations, at most three values of each key.
double best_of_grid(const Tuned& tuned) {
  constexpr std::array kHomes{"auto", "host", "nvme"};
  constexpr std::array kBlocks{"65536", "262144", "1048576"};
  constexpr std::array kLanes{"1", "4", "16"};
  constexpr std::array kDepths{"1", "8", "32"};
  constexpr std::array kOrders{"horizontal", "vertical"};
  double best_s = 1e9;
  for (const char* home : kHomes)
    for (const char* block : kBlocks)
      for (const char* lanes : kLanes)
        for (const char* depth : kDepths)
          for (const char* order : kOrders)
            best_s = std::min(best_s,
                              step_s(tuned, {{"placement.optimizer", fmt::format("\"{}\"", home)},
                                             {"storage.block_elements", block},
                                             {"optimizer.lanes", lanes},
                                             {"storage.queue_depth", depth},
                                             {"batch.order", fmt::format("\"{}\"", order)}}));
  return best_s;
}

// The keys that the grid has no axis for stay as they are, so that the search has no other means.
const std::vector<std::string> kBesideGrid = {"memory", "activations", "batch.sequences",
                                              "batch.micro_batches", "optimizer.overlap"};

TEST(RunModel, ReachesTheBestOfAGridFromFiveBadConfigs) {
  const double best_s = best_of_grid(Tuned());
  constexpr std::array kBad{
      R"({"storage": {"block_elements": 4096}})", R"({"optimizer": {"lanes": 1}})",
      R"({"storage": {"queue_depth": 1}})",
      R"({"placement": {"parameters": "nvme", "optimizer": "nvme"}})",
      R"({"batch": {"order": "horizontal"}, "placement": {"parameters": "nvme"}})"};
  for (const char* changes : kBad) {
    const Tuned tuned(nlohmann::json::parse(changes));
    const TuneResult result = tuned.search(kBesideGrid);
    const double given_s = result.given.prediction.step_s;
    ASSERT_FALSE(result.best.empty()) << changes;
    const double found_s = result.best.front().prediction.step_s;
    EXPECT_GE(best_s / found_s, 0.97) << changes << ": " << found_s << " s, the grid " << best_s;
    EXPECT_LT(found_s, 0.97 * given_s) << changes << " is no bad config";
  }
}

TEST(RunModel, FreeMemoryIsUsed) {
  const Tuned tuned(nlohmann::json::parse(R"({"memory": {"device": "16MiB", "host": "64MiB"},
      "placement": {"parameters": "nvme", "optimizer": "nvme"}})"));
  const TuneResult result = tuned.search();
  ASSERT_FALSE(result.best.empty());
  EXPECT_TRUE(result.best.front().settings.contains("memory.host"));
  EXPECT_EQ(result.best.front().prediction.binds, "compute");
}

TEST(RunModel, ComputationFollowsBatchAndActivations) {
  Rates rates;  // next to nothing but computation takes time
  rates.adam_parameters_per_second = rates.norm_parameters_per_second = 1e13;
  const Tuned tuned(nlohmann::json::parse(R"({"memory": {"device": "1GiB", "host": "1GiB"},
      "placement": {"parameters": "device", "optimizer": "host"}})"),
                    rates);
  const double given_s = step_s(tuned, {});
  // The same sequences in half of the micro-batches take the same time, and 2 ms of 8 are forward,
  // which "keep" does not compute again.
  EXPECT_NEAR(step_s(tuned, {{"batch.sequences", "4"}, {"batch.micro_batches", "4"}}) / given_s, 1,
              0.01);
  EXPECT_NEAR(step_s(tuned, {{"activations", "\"keep\""}}) / given_s, 6.0 / 8, 0.01);
}

TEST(RunModel, WhatDoesNotFitHasAnObstacle) {
  const Tuned tuned;
  EXPECT_NE(tuned.model().predict({{"memory.host", "\"1MiB\""}}).obstacle.find("memory.host"),
            std::string::npos);
  EXPECT_NE(tuned.model()
                .predict({{"activations", "\"keep\""}, {"batch.order", "\"vertical\""}})
                .obstacle,
            "");
}

TEST(RunModel, ATextWithSettingsIsAConfig) {
  const Tuned tuned(nlohmann::json::parse(
      R"({"optimizer": {"groups": [{"tensors": ["*"], "weight_decay": 0.5}]}})"));
  const TuneSettings settings = {{"optimizer.lanes", "null"}, {"memory.host", "\"auto\""}};
  const ConfigDocument document(tuned.model().text_with(settings), "the text");
  EXPECT_EQ(document.origin_of("optimizer.lanes"), "default");
  EXPECT_EQ(document.json_of("memory.host"), "\"auto\"");
  EXPECT_EQ(document.json_of("memory.device"), "\"48MiB\"");
  EXPECT_EQ(document.entry_count("optimizer.groups"), 1u);
  EXPECT_EQ(document.integer("batch.micro_batches"), 8u);
}

TEST(TuneAxes, KeptKeysAndGivenValuesAreLeftOut) {
  const Tuned tuned;
  const auto changes = [](const std::vector<TuneAxis>& axes, const std::string& key) {
    std::size_t count = 0;
    for (const TuneAxis& axis : axes)
      for (const TuneSettings& choice : axis.choices) count += choice.contains(key) ? 1 : 0;
    return count;
  };
  EXPECT_GT(changes(tuned.axes(), "memory.host"), 0u);
  EXPECT_EQ(changes(tuned.axes({"memory"}), "memory.host"), 0u);
  EXPECT_GT(changes(tuned.axes({"memory"}), "placement.optimizer"), 0u);
  for (const TuneAxis& axis : tuned.axes()) {
    EXPECT_TRUE(axis.choices.front().empty());
    for (const TuneSettings& choice : axis.choices) {
      const auto found = choice.find("optimizer.lanes");
      EXPECT_TRUE(found == choice.end() || found->second != "8");
    }
  }
}

TEST(TuneAxes, SmallBlocksAreForSmallModels) {
  const auto has_small_blocks = [](const Tuned& tuned) {
    for (const TuneAxis& axis : tuned.axes())
      for (const TuneSettings& choice : axis.choices)
        if (choice.contains("storage.block_elements") &&
            choice.at("storage.block_elements") == "16384")
          return true;
    return false;
  };
  EXPECT_TRUE(has_small_blocks(Tuned()));
  EXPECT_FALSE(has_small_blocks(Tuned(nlohmann::json::parse(R"({"model": {"layers": 24}})"))));
}

// Sequences of a step stay, and a tied head, whose bits the order changes, keeps its order.
// Whatever stays as given: the sequences of a step, and with a tied head the order of additions.
TEST(TuneAxes, NothingChangesWhatAStepLearns) {
  const Tuned tied(
      nlohmann::json::parse(R"({"model": {"tied_head": true}, "batch": {"order": "vertical"}})"));
  const std::vector<std::vector<std::string>> all_kept = {
      {}, {"batch.sequences"}, {"batch.micro_batches"}, {"batch.order"}, {"activations"}};
  for (const std::vector<std::string>& kept : all_kept) {
    for (const TuneAxis& axis : tied.axes(kept)) {
      for (const TuneSettings& choice : axis.choices) {
        EXPECT_FALSE(choice.contains("batch.order"));
        const auto number = [&](const char* key, std::uint64_t given) {
          const auto found = choice.find(key);
          return found == choice.end() ? given : std::stoull(found->second);
        };
        EXPECT_EQ(number("batch.sequences", 2) * number("batch.micro_batches", 8), 16u);
        const auto policy = choice.find("optimizer.overlap");
        EXPECT_TRUE(policy == choice.end() || policy->second != "\"eager\"");
      }
    }
  }
}

}  // namespace
}  // namespace sluice
