// The host device gives the same bits on every thread.
#include <sluice/host_device.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <thread>

#include <sluice/units.h>
#include "tests/support/hostile_environment.h"

namespace sluice::test {
namespace {

// Work may run on the thread that waits for it, and gives the same bits there. Neither the maker
// of the device nor earlier work changes them.
TEST(HostDeviceEnvironment, ComputesInTheDefaultFloatEnvironment) {
  if (!kKnowsEnvironment) GTEST_SKIP() << "the environment is set on x86-64 and aarch64 only";
  volatile float one = 1;
  volatile float three = 3;
  volatile float least = 0x1p-126f;
  const float third = one / three;
  const float denormal = least / three;
  for (const unsigned hostile : kHostile) {
    std::uint32_t wrong = 0;
    std::uint32_t on_this_thread = 0;
    const unsigned after = run_under(hostile, [&] {
      const auto device = make_host_device({.memory_bytes = 1_MiB, .at_once_bytes_max = 4_KiB});
      const Stream stream(*device, "compute");
      const auto look = [&, caller = std::this_thread::get_id()] {
        wrong += one / three != third || least / three != denormal ? 1 : 0;
        on_this_thread += std::this_thread::get_id() == caller ? 1 : 0;
        set_control(hostile);
      };
      for (int i = 0; i < 1000; ++i) {
        device->launch(stream.id(), look);
        device->launch(stream.id(), look);
        device->call_host(stream.id(), look);
        device->synchronize(stream.id());
        device->notify(stream.id(), look);
      }
      device->synchronize(stream.id());
    });
    EXPECT_EQ(wrong, 0u);
    EXPECT_GT(on_this_thread, 1000u);
    EXPECT_EQ(after, hostile);
  }
}

}  // namespace
}  // namespace sluice::test
