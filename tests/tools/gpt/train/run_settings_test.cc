// The settings that a saved state of `sluice train` keeps.
#include "tools/gpt/train/run_settings.h"

#include <gtest/gtest.h>

namespace sluice::test {
namespace {

TEST(RunSettings, LazyUpdatesHaveTheBitsOfThoseInEachStep) {
  const std::string key = "optimizer.untouched";
  TrainConfig config;
  for (const auto& [policy, kept] :
       {std::pair(UntouchedPolicy::kUpdate, "update"), std::pair(UntouchedPolicy::kLazy, "update"),
        std::pair(UntouchedPolicy::kSkip, "skip")}) {
    config.engine.optimizer.untouched = policy;
    EXPECT_EQ(settings_of(config, 1).at(key), kept);
  }
  // Older versions wrote the policy's name, or nothing.
  EXPECT_EQ(value_before({{key, "lazy"}}, key), "update");
  EXPECT_EQ(value_before({{key, "skip"}}, key), "skip");
  EXPECT_EQ(value_before({}, key), "update");
}

}  // namespace
}  // namespace sluice::test
