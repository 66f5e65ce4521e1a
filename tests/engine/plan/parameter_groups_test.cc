#include "engine/plan/parameter_groups.h"

#include <random>

#include <fnmatch.h>
#include <gtest/gtest.h>

#include "engine/plan/layout.h"
#include "tests/support/expect_error.h"

namespace sluice {
namespace {

ModelSpec weights_and_biases() {
  ModelSpec spec;
  spec.units.push_back({"a",
                        {{.name = "a.weight", .shape = {300}},
                         {.name = "a.bias", .shape = {3}, .weight_decay = WeightDecay::kNone}}});
  spec.units.push_back({"b",
                        {{.name = "b.weight", .shape = {300}},
                         {.name = "b.bias", .shape = {3}, .weight_decay = WeightDecay::kNone}}});
  return validated(spec);
}

Config::Optimizer optimizer(std::vector<Config::Optimizer::Group> groups) {
  Config::Optimizer options;
  options.adam.weight_decay = 0.5;
  options.groups = std::move(groups);
  return options;
}

// The coefficients of tensor `index` under a learning rate of 1 in step 1.
AdamCoefficients coefficients(const Config::Optimizer& options, std::size_t index) {
  const ParameterGroups groups(options, weights_and_biases());
  const StepCoefficients step = groups.coefficients(1.0, {}, {1, 1}, 1.0f);
  return std::get<AdamCoefficients>(step.of_set.at(groups.set_of_tensors()[index]));
}

TEST(ParameterGroups, WithoutGroupsTheTensorsDecide) {
  const ParameterGroups groups(optimizer({}), weights_and_biases());
  EXPECT_EQ(std::vector(groups.set_of_tensors().begin(), groups.set_of_tensors().end()),
            (std::vector<std::uint32_t>{0, 1, 0, 1}));
  EXPECT_EQ(groups.coefficients(1.0, {}, {1, 1}, 1.0f).of_set.size(), 2u);
  EXPECT_EQ(coefficients(optimizer({}), 0).decay_factor, 0.5f);
  EXPECT_EQ(coefficients(optimizer({}), 1).decay_factor, 1.0f);
}

TEST(ParameterGroups, TheFirstGroupThatNamesATensorCounts) {
  const Config::Optimizer options =
      optimizer({{.tensors = {"b.*"}, .learning_rate_factor = 0.25},
                 {.tensors = {"*.bias"}, .learning_rate_factor = 0.5, .weight_decay = 0.125}});
  EXPECT_EQ(coefficients(options, 0).decay_factor, 0.5f);
  EXPECT_FLOAT_EQ(coefficients(options, 0).step_size, 10.0f);  // 1 / (1 - beta1)
  EXPECT_EQ(coefficients(options, 1).decay_factor, 0.9375f);   // a bias, but the group decays it
  EXPECT_FLOAT_EQ(coefficients(options, 1).step_size, 5.0f);
  EXPECT_EQ(coefficients(options, 2).decay_factor, 0.875f);
  EXPECT_FLOAT_EQ(coefficients(options, 2).step_size, 2.5f);
  EXPECT_EQ(coefficients(options, 3).decay_factor, 1.0f);
  EXPECT_FLOAT_EQ(coefficients(options, 3).step_size, 2.5f);
}

TEST(ParameterGroups, TensorsOfAGroupWithEqualDecayShareASet) {
  const ParameterGroups groups(optimizer({{.tensors = {"a.*"}, .weight_decay = 0.5},
                                          {.tensors = {"b.bias"}, .learning_rate_factor = 1}}),
                               weights_and_biases());
  EXPECT_EQ(std::vector(groups.set_of_tensors().begin(), groups.set_of_tensors().end()),
            (std::vector<std::uint32_t>{0, 0, 1, 2}));
  const Layout layout(weights_and_biases(), {}, 4096, groups.set_of_tensors());
  EXPECT_EQ(layout.tensors()[2].hyperparameter_set, 1u);
  EXPECT_EQ(layout.tensors()[3].hyperparameter_set, 2u);
}

TEST(ParameterGroups, TheRateOfAGroupTakesThePlaceOfItsFactor) {
  const ParameterGroups groups(optimizer({{.tensors = {"a.*"}, .learning_rate_factor = 0.25},
                                          {.tensors = {"b.bias"}, .learning_rate_factor = 0.25}}),
                               weights_and_biases());
  const std::vector<double> rates{2.0, 4.0};
  const StepCoefficients step = groups.coefficients(1.0, rates, {1, 1}, 1.0f);
  const auto step_size = [&](std::size_t tensor) {
    return std::get<AdamCoefficients>(step.of_set.at(groups.set_of_tensors()[tensor])).step_size;
  };
  EXPECT_FLOAT_EQ(step_size(0), 20.0f);  // 1 / (1 - beta1)
  EXPECT_FLOAT_EQ(step_size(1), 20.0f);
  EXPECT_FLOAT_EQ(step_size(2), 10.0f);
  EXPECT_FLOAT_EQ(step_size(3), 40.0f);
}

TEST(ParameterGroups, PatternsWithoutEffectAreNamed) {
  const auto complaint = [](std::vector<Config::Optimizer::Group> groups) {
    return test::expect_error(ErrorCode::kConfig, [&] {
      ParameterGroups(optimizer(std::move(groups)), weights_and_biases());
    });
  };
  EXPECT_EQ(complaint({{.tensors = {"a.*", "c.*"}}}),
            "optimizer.groups[0]: \"c.*\" matches no tensor; the model has a.weight, a.bias, "
            "b.weight, b.bias");
  EXPECT_NE(complaint({{.tensors = {"*"}}, {.tensors = {"a.weight"}}})
                .find("optimizer.groups[1] has no effect"),
            std::string::npos);
}

TEST(ParameterGroups, PatternsMeanWhatTheShellMeans) {
  EXPECT_TRUE(matches_pattern("h.*.ln_?.weight", "h.11.ln_1.weight"));
  EXPECT_FALSE(matches_pattern("h.*.ln_?.weight", "h.11.ln_f.weights"));
  EXPECT_FALSE(matches_pattern("wte", "wte.weight"));
  EXPECT_FALSE(matches_pattern("", "a"));
  EXPECT_TRUE(matches_pattern("**", ""));
  std::mt19937 random(1);
  const auto text = [&](std::string_view letters) {
    std::string made;
    for (std::size_t length = random() % 9; length > 0; --length)
      made += letters[random() % letters.size()];
    return made;
  };
  std::uint32_t matched = 0;
  for (int i = 0; i < 200'000; ++i) {
    const std::string pattern = text("ab*?."), name = text("ab.");
    const bool expected = fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
    ASSERT_EQ(matches_pattern(pattern, name), expected) << pattern << " " << name;
    matched += expected ? 1 : 0;
  }
  EXPECT_GT(matched, 1000u);
}

}  // namespace
}  // namespace sluice
