// One rank of a run in which one rank is to fail: rank_fault_program RANK PHASE ACTION FOLDER. In
// PHASE (init: before MPI starts; start, forward, backward, reduce, update of the second step; end:
// after it, where MPI ends) rank RANK kills or stops itself, throws, or differs in its config
// (ACTION kill, stop, throw, differ). Every rank that ends by itself says why on standard error and
// ends the others, as an application would.
#include <signal.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include <fmt/format.h>

#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/mpi_collectives.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

volatile std::sig_atomic_t was_told_to_end = 0;

// mpirun ends the others when one is killed: who waits then says for whom.
void tell_of_end(const std::string& waiting) {
  if (was_told_to_end == 0) return;
  was_told_to_end = 0;
  fmt::print(stderr, "told to end while {}\n", waiting);
}

struct Fault {
  std::uint32_t rank;
  std::string phase;
  std::string action;

  void strike(std::uint32_t own_rank, const std::string& now, std::uint64_t step) const {
    if (own_rank != rank || now != phase || step != 2) return;
    if (action == "kill") ::raise(SIGKILL);
    if (action == "stop") ::raise(SIGSTOP);
    if (action == "throw") throw Error(ErrorCode::kIo, "the application has thrown");
  }
};

void train(const Fault& fault, const std::string& folder, MpiWorld& world, HostDevice& device,
           Collectives& collectives) {
  Config config = toy_config(folder);
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.optimizer.overlap = OverlapPolicy::kDeferred;
  config.memory.device_bytes = 512 << 10;
  config.sharding.keep_gathered_bytes = 0;  // forward and backward gather
  if (fault.action == "differ" && world.rank() == fault.rank) config.optimizer.adam.epsilon = 1e-7;
  const std::uint32_t rank = world.rank();
  const ModelSpec model = validated(toy_model());
  fault.strike(rank, "start", 2);
  Engine engine(config, model, device, &collectives);
  engine.initialize(toy_values());
  const Stream stream(device, "compute");
  const std::uint64_t steps = fault.phase == "end" ? 2 : 1000;
  for (std::uint64_t number = 1; number <= steps; ++number) {
    Step step = engine.begin_step({.learning_rate = 1e-3});
    const auto walk = [&](const std::vector<UnitId>& units, Pass pass, const char* phase) {
      for (std::size_t i = 0; i < units.size(); ++i) {
        const Lease lease = step.acquire(units[i], pass, stream);
        if (i == units.size() / 2) fault.strike(rank, phase, number);
      }
    };
    walk(model.forward_order, Pass::kForward, "forward");
    walk(model.backward_order, Pass::kBackward, "backward");
    fault.strike(rank, "reduce", number);
    (void)step.finish();
    fault.strike(rank, "update", number);
  }
}

int run(const Fault& fault, const std::string& folder) {
  std::signal(SIGTERM, [](int) { was_told_to_end = 1; });
  const auto rank = static_cast<std::uint32_t>(std::atoi(std::getenv("OMPI_COMM_WORLD_RANK")));
  std::unique_ptr<MpiWorld> world;
  try {
    fault.strike(rank, "init", 2);
    world = std::make_unique<MpiWorld>(
        HostCollectivesOptions{.timeout_s = 2, .sum = sum_in_order, .on_wait = tell_of_end});
    {
      const auto device = make_host_device({.memory_bytes = 64ull << 20});
      const auto collectives = world->join(*device);
      train(fault, folder, *world, *device, *collectives);
    }
    fault.strike(rank, "end", 2);
    world->leave();
  } catch (const std::exception& error) {
    fmt::print(stderr, "rank {}: {}\n", rank, error.what());
    std::fflush(nullptr);
    if (world != nullptr) world->abort();
    ::_exit(1);
  }
  return 0;
}

}  // namespace
}  // namespace sluice::test

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  return sluice::test::run(
      {.rank = static_cast<std::uint32_t>(std::atoi(argv[1])), .phase = argv[2], .action = argv[3]},
      argv[4]);
}
