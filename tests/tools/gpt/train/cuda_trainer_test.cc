// Training on a GPU.
#include <gtest/gtest.h>

#include "tests/tools/gpt/train/gpu_trainer_cases.h"

namespace sluice {
namespace {

INSTANTIATE_TEST_SUITE_P(Cuda, GpuTrainerTest,
                         testing::Values(gpt::cuda_machine(gpt::ProductKernels::kFast)),
                         device_machine_name);

}  // namespace
}  // namespace sluice
