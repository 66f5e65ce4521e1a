// The central promise: wherever the state lives, training gives the bits of training in memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <tuple>
#include <vector>

#include <sluice/units.h>
#include "tests/engine/exactness_cases.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// Held at once: one to three, by turns.
std::uint32_t leases_of(DType parameters, std::uint32_t micro_batches) {
  if (parameters == DType::kBf16) return micro_batches == 1 ? 1 : 2;
  return parameters == DType::kFp32 && micro_batches == 1 ? 3 : 1;
}

class Exactness
    : public testing::TestWithParam<std::tuple<Case, PolicyCase, DType, DType, std::uint32_t>> {};

TEST_P(Exactness, EqualsTheOracleBitForBit) {
  const auto& [placement, policy, parameters, gradients, micro_batches] = GetParam();
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.optimizer.overlap = policy.policy;
  config.optimizer.clip_norm = clip_norm_of(policy, micro_batches);
  config.precision = {.parameters = parameters, .gradients = gradients};
  if (parameters == DType::kFp32) config.memory.host_bytes = 16_MiB;
  placement.change(config);
  if (parameters == DType::kFp32 && config.memory.device_bytes) *config.memory.device_bytes *= 2;
  if (gradients == DType::kFp32 && config.memory.host_bytes < 2_MiB)
    *config.memory.host_bytes += 300_KiB;
  const std::uint32_t leases = leases_of(parameters, micro_batches);
  if (config.memory.device_bytes) *config.memory.device_bytes += (leases - 1) * 100_KiB;
  const ToyOptions options{.steps = 4,
                           .micro_batches = micro_batches,
                           .evaluate = true,
                           .leases = leases,
                           .has_own_memory = placement.is_gpu};

  const ToyResult expected = toy_oracle(config, options);
  const ToyResult actual = run_toy(config, options);

  EXPECT_TRUE(same_training(actual, expected));
  ASSERT_EQ(actual.reports.size(), expected.reports.size());
  for (std::size_t i = 0; i < actual.reports.size(); ++i) {
    EXPECT_EQ(actual.reports[i].gradient_norm, expected.reports[i].gradient_norm);
    EXPECT_EQ(actual.reports[i].clip_factor, expected.reports[i].clip_factor);
    EXPECT_EQ(actual.reports[i].policy, policy.policy);
    if (policy.policy != OverlapPolicy::kSerial) continue;
    EXPECT_EQ(actual.reports[i].nvme_read_bytes, actual.predicted.nvme_read_bytes);
    EXPECT_EQ(actual.reports[i].nvme_write_bytes, actual.predicted.nvme_write_bytes);
  }
}

std::string case_name(const testing::TestParamInfo<Exactness::ParamType>& info) {
  const auto& [placement, policy, parameters, gradients, micro_batches] = info.param;
  return placement.name + "_" + policy.name + "_" + std::string(name_of(parameters)) + "_" +
         std::string(name_of(gradients)) + "_" + std::to_string(micro_batches) + "mb";
}

// No block has all of its state on storage, so every speculative update waits for the norm.
bool has_no_shadows(const Case& placement) {
  constexpr std::string_view kNames[] = {"in_memory",          "in_memory_copied",
                                         "parameters_host",    "parameters_host_copied",
                                         "parameters_nvme",    "optimizer_nvme",
                                         "all_device",         "device_and_host",
                                         "in_memory_streamed", "gradients_on_device_streamed",
                                         "unified_streamed"};
  return std::ranges::find(kNames, placement.name) != std::end(kNames);
}

// Another way through all_nvme, of which one precision and number of micro-batches say enough.
bool is_variation(const Case& placement) {
  return placement.name.starts_with("all_nvme_") && placement.name != "all_nvme_large_blocks";
}

// Every cell, less those that do what another one does.
std::vector<Exactness::ParamType> cells(const std::vector<Case>& placements,
                                        const std::vector<PolicyCase>& policies,
                                        const std::vector<DType>& parameters, DType gradients,
                                        const std::vector<std::uint32_t>& micro_batches) {
  std::vector<Exactness::ParamType> chosen;
  for (const Case& placement : placements) {
    for (const PolicyCase& policy : policies) {
      const bool speculates = policy.policy == OverlapPolicy::kSpeculative;
      if (has_no_shadows(placement) && speculates && policy.clip_norm != kBitesSometimes) continue;
      for (const DType parameter : parameters) {
        for (const std::uint32_t count : micro_batches) {
          if (is_variation(placement) && (parameter != DType::kBf16 || count == 1)) continue;
          chosen.emplace_back(placement, policy, parameter, gradients, count);
        }
      }
    }
  }
  return chosen;
}

const std::vector<Case> kAllCases{std::begin(kCases), std::end(kCases)};
const std::vector<PolicyCase> kAllPolicies{std::begin(kPolicies), std::end(kPolicies)};

INSTANTIATE_TEST_SUITE_P(Placements, Exactness,
                         testing::ValuesIn(cells(kAllCases, kAllPolicies,
                                                 {DType::kBf16, DType::kFp32}, DType::kBf16,
                                                 {1, 4})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(
    Fp32Gradients, Exactness,
    testing::ValuesIn(cells({kCases[0], kCases[4], kCases[9]}, {kPolicies[0], kPolicies[1]},
                            {DType::kBf16, DType::kFp32, DType::kFp16}, DType::kFp32, {1, 4})),
    case_name);
INSTANTIATE_TEST_SUITE_P(Fp16, Exactness,
                         testing::ValuesIn(cells(kAllCases, kAllPolicies, {DType::kFp16},
                                                 DType::kFp16, {4})),
                         case_name);

}  // namespace
}  // namespace sluice::test
