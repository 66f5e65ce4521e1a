// Training over stand-ins for the CUDA runtime and for cuBLASLt. Two descriptions of a product give
// other bits there, so the cases see an address of the engine's that is less aligned than another.
#include <gtest/gtest.h>

#include "tests/tools/gpt/model/fake_gpu_machine.h"
#include "tests/tools/gpt/train/gpu_trainer_cases.h"

namespace sluice {
namespace {

INSTANTIATE_TEST_SUITE_P(FakeCublasLt, GpuTrainerTest, testing::Values(gpt::fake_gpu_machine()),
                         device_machine_name);

}  // namespace
}  // namespace sluice
