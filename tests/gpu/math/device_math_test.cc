// DeviceMath's kernel bodies, run on the host device.
#include "gpu/math/device_math.h"

#include <gtest/gtest.h>

#include "gpu/math/device_math_over.h"
#include "gpu/math/host_launcher.h"
#include "tests/gpu/math/device_code_cases.h"

namespace sluice {
namespace {

INSTANTIATE_TEST_SUITE_P(Host, DeviceMathTest,
                         testing::Values(MathMachineFactory{
                             "host", [] { return std::string(); },
                             [] {
                               auto device = make_host_device({.memory_bytes = 64_MiB});
                               auto math = std::make_unique<DeviceMathOver<HostLauncher>>(
                                   HostLauncher(*device));
                               return MathMachine{std::move(device), std::move(math)};
                             }}),
                         math_machine_name);

}  // namespace
}  // namespace sluice
