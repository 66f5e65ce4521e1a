// The contract of collectives over MPI: run by mpirun, every process is one rank and runs all cases
// in step.
#include "gpu/mpi_collectives.h"

#include <gtest/gtest.h>

#include "cpu_optim/ordered_sum.h"
#include "tests/contract/collectives_contract.h"

namespace sluice {
namespace {

MpiWorld& world() {
  static MpiWorld instance({.timeout_s = 60, .sum = sum_in_order});
  return instance;
}

// One device and one object for all cases: an object joins its world once.
void run_here(const RankBody& body) {
  MpiWorld& mpi = world();
  static const auto device = make_host_device({.memory_bytes = 256_MiB});
  static const auto collectives = mpi.join(*device);
  body(*collectives, *device);
}

INSTANTIATE_TEST_SUITE_P(Mpi, CollectivesContract,
                         testing::Values(CollectivesFactory{"mpi", run_here}),
                         collectives_factory_name);

}  // namespace
}  // namespace sluice
