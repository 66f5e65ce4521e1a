#include "tools/gpt/model/device_losses.h"

#include <gtest/gtest.h>

#include <cstring>

#include <sluice/host_device.h>
#include <sluice/units.h>

namespace sluice::gpt {
namespace {

class DeviceLossesTest : public testing::Test {
 protected:
  // A loss on the device that its stream overwrites with the next one.
  void keep(double value) {
    device_->launch(stream_.id(),
                    [this, value] { std::memcpy(loss_.data(), &value, sizeof value); });
    losses_.keep(reinterpret_cast<const double*>(loss_.data()), stream_.id());
  }

  std::unique_ptr<HostDevice> device_ =
      make_host_device({.memory_bytes = 1_MiB, .has_own_memory = true});
  const Stream stream_{*device_, "test"};
  const DeviceBuffer loss_{*device_, sizeof(double), "loss"};
  DeviceLosses losses_{*device_};
};

TEST_F(DeviceLossesTest, ComeInTheirOrderHoweverManyTheyAre) {
  constexpr std::uint32_t kCount = 2 * DeviceLosses::kPlaces + 3;
  for (std::uint32_t i = 0; i < kCount; ++i) keep(i + 0.5);
  const std::vector<double> taken = losses_.take(stream_.id());
  ASSERT_EQ(taken.size(), kCount);
  for (std::uint32_t i = 0; i < kCount; ++i) ASSERT_EQ(taken[i], i + 0.5);
  EXPECT_TRUE(losses_.take(stream_.id()).empty());
}

TEST_F(DeviceLossesTest, ThoseOfAPassThatWasGivenUpDoNotComeBack) {
  for (std::uint32_t i = 0; i <= DeviceLosses::kPlaces; ++i) keep(1);
  losses_.drop();
  keep(2);
  EXPECT_EQ(losses_.take(stream_.id()), std::vector<double>{2});
}

}  // namespace
}  // namespace sluice::gpt
