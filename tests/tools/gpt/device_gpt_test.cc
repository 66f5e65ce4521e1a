// The GPT for GPUs, its kernel bodies run on the host device.
#include "tools/gpt/device_gpt.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/tools/gpt/device_gpt_cases.h"

namespace sluice::gpt {
namespace {

INSTANTIATE_TEST_SUITE_P(Host, DeviceGptTest, testing::ValuesIn(device_gpt_cases(host_machine())),
                         device_gpt_case_name);

TEST(DeviceGpt, RefusesForeignTokensAndTypes) {
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  DeviceOpsOver<HostLauncher> ops(HostLauncher(*device), DType::kFp32, DType::kFp32);
  const GptConfig config{
      .layers = 1, .heads = 1, .embedding = 8, .context = 4, .vocabulary = 5, .tied_head = true};
  DeviceGpt gpt(config, {.batch = 1, .sequence = 4}, *device, ops);
  const Stream stream(*device, "test");
  const std::vector<std::uint32_t> good{0, 1, 2, 4};
  const std::vector<std::uint32_t> bad{0, 1, 5, 4};
  EXPECT_THROW(gpt.start(DeviceGpt::Mode::kTraining, bad, good, stream.id()), Error);
  EXPECT_THROW(gpt.start(DeviceGpt::Mode::kTraining, good, bad, stream.id()), Error);
  EXPECT_THROW(DeviceGpt(config, {.batch = 1, .sequence = 5}, *device, ops), Error);
  EXPECT_THROW(check_device_types(DType::kFp16, DType::kFp16), Error);
  EXPECT_THROW(check_device_types(DType::kFp32, DType::kBf16), Error);
  EXPECT_THROW(check_device_types(DType::kBf16, DType::kFp16), Error);
}

}  // namespace
}  // namespace sluice::gpt
