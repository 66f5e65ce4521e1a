// Training gives the same bits on every processor: the hashes of small trainings are those of
// tests/golden/state_hashes.txt. Under another instruction set, these tests say whether the
// arithmetic, the layout and the way through storage are the same.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <ostream>
#include <string>

#include <sluice/units.h>
#include "io/checksum.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

struct HashCase {
  std::string name;
  OptimizerKind kind = OptimizerKind::kAdamW;
  OptimizerState state = OptimizerState::kFp32;
  DType parameters = DType::kBf16;
  DType gradients = DType::kBf16;
};

void PrintTo(const HashCase& value, std::ostream* out) {
  *out << value.name;
}

const HashCase kHashCases[] = {
    {.name = "adamw"},
    {.name = "adamw_fp32", .parameters = DType::kFp32, .gradients = DType::kFp32},
    {.name = "adamw_fp16", .parameters = DType::kFp16, .gradients = DType::kFp16},
    {.name = "adamw_fp32_gradients", .gradients = DType::kFp32},
    {.name = "adamw_bf16_moments", .state = OptimizerState::kBf16},
    {.name = "adamw_8bit_moments", .state = OptimizerState::k8bit},
    {.name = "adam", .kind = OptimizerKind::kAdam},
    {.name = "lion", .kind = OptimizerKind::kLion},
    {.name = "adagrad", .kind = OptimizerKind::kAdagrad},
    {.name = "sgd", .kind = OptimizerKind::kSgd},
};

std::map<std::string, std::string> golden_hashes() {
  std::ifstream file(SLUICE_GOLDEN_DIR "/state_hashes.txt");
  std::map<std::string, std::string> hashes;
  for (std::string name, hash; file >> name >> hash;) hashes[name] = hash;
  return hashes;
}

class StateHashes : public testing::TestWithParam<HashCase> {};

TEST_P(StateHashes, AreThoseOfEveryProcessor) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.device_bytes = 800_KiB;
  config.memory.host_bytes = 16_MiB;
  config.storage.backend = IoBackend::kThreads;  // emulators have no io_uring
  config.optimizer.kind = GetParam().kind;
  config.optimizer.state = GetParam().state;
  config.precision.parameters = GetParam().parameters;
  config.precision.gradients = GetParam().gradients;
  const ToyResult result = run_toy(config, {.steps = 4, .micro_batches = 2});
  const std::string hash = hex_of(checksum128(result.state));
  EXPECT_EQ(golden_hashes()[GetParam().name], hash) << GetParam().name << " " << hash;
}

INSTANTIATE_TEST_SUITE_P(Cases, StateHashes, testing::ValuesIn(kHashCases),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace sluice::test
