// DeviceMath on a GPU.
#include <gtest/gtest.h>

#include "gpu/cuda/device_math_choice.h"
#include "tests/gpu/math/device_code_cases.h"

namespace sluice {
namespace {

INSTANTIATE_TEST_SUITE_P(Cuda, DeviceMathTest,
                         testing::Values(MathMachineFactory{
                             "cuda", [] { return why_no_cuda_code(); },
                             [] {
                               auto device = make_cuda_device({.memory_bytes = 64_MiB});
                               auto math = make_cuda_math(*device);
                               return MathMachine{std::move(device), std::move(math)};
                             }}),
                         math_machine_name);

}  // namespace
}  // namespace sluice
