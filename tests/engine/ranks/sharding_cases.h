// The common part of the tests with several ranks. The ranks are threads or processes. The header
// has the configs of each stage, and a function that compares results with the oracle. The
// functions are pure, except that toy_config() reads the environment.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tests/support/same_training.h"
#include "tests/support/toy_training.h"

namespace sluice::test {

// Stages 1 and 2 keep parameters on the device. Stage 3 keeps its shards in host memory or on
// storage.
inline Config sharded_config(const std::string& path, std::uint32_t stage, bool uses_nvme,
                             DType dtype) {
  Config config = toy_config(path);
  const bool is_replicated = stage == 1 || stage == 2;
  config.placement.optimizer = uses_nvme ? TierChoice::kNvme : TierChoice::kHost;
  config.placement.parameters = is_replicated || stage == 0 ? TierChoice::kAuto : TierChoice::kHost;
  if (uses_nvme && !is_replicated) config.placement.parameters = TierChoice::kNvme;
  config.precision = {.parameters = dtype, .gradients = dtype};
  config.sharding.stage = stage;
  config.sharding.keep_gathered_bytes = 0;  // otherwise all of the toy's small units stay gathered
  config.threads = 1;
  return config;
}

inline void expect_oracle(const ToyResult& actual, const ToyResult& expected,
                          const std::string& what) {
  EXPECT_TRUE(same_training(actual, expected)) << what;
  ASSERT_EQ(actual.reports.size(), expected.reports.size()) << what;
  for (std::size_t i = 0; i < expected.reports.size(); ++i)
    EXPECT_EQ(actual.reports[i].gradient_norm, expected.reports[i].gradient_norm) << what;
}

}  // namespace sluice::test
