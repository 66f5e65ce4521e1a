// Several ranks as processes: the cases of sharding_test.cc over MPI, against the same oracle.
// Every process runs all cases, in step.
#include "cpu_optim/ordered_sum.h"
#include "gpu/mpi_collectives.h"
#include "tests/engine/sharding_cases.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

TEST(ShardingOverMpi, EveryStageAndPlacementEqualsTheOracle) {
  MpiWorld world({.timeout_s = 60, .sum = sum_in_order});
  const auto device = make_host_device({.memory_bytes = 64ull << 20});
  const auto collectives = world.join(*device);
  for (const std::uint32_t stage : {0u, 1u, 2u, 3u}) {
    for (const bool uses_nvme : {false, true}) {
      for (const DType dtype : {DType::kBf16, DType::kFp32, DType::kFp16}) {
        const TempDirectory directory;
        const Config config = sharded_config(directory.path(), stage, uses_nvme, dtype);
        const ModelSpec model = toy_model();
        const ToyOptions options{
            .steps = 3, .rank = world.rank(), .rank_count = world.rank_count()};
        Engine engine(config, model, *device, {}, collectives.get());
        expect_oracle(run_toy(engine, model, *device, config, options), toy_oracle(config, options),
                      "stage " + std::to_string(stage) + (uses_nvme ? " nvme " : " memory ") +
                          std::string(name_of(dtype)));
      }
    }
  }
}

}  // namespace
}  // namespace sluice::test
