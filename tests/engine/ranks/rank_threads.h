// Runs a toy training on several ranks that are threads of this process.
// Thread rule: one thread.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/placement.h"
#include "gpu/ranks/local_collectives.h"
#include "tests/engine/ranks/sharding_cases.h"
#include "tests/support/delays.h"
#include "tests/support/fault_queue.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {

struct RankRun {
  ToyResult result;
  std::string failure;
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
  std::uint64_t shadow_bytes = 0;
};

// The conditions under which ranks run. All work on the ranks' devices first waits a random time up
// to `delay_us_max`.
struct RankConditions {
  double timeout_s = 60;
  std::uint32_t delay_us_max = 0;
  std::uint64_t seed = 1;
  bool closes = false;  // closes the engine, so that a durable store commits the last step
  std::function<void(std::uint32_t rank, Config& config)> change = {};  // changes one rank's config
  std::uint32_t io_delay_us_max = 0;                                    // limit per transfer
  // Changes the model and the training of one rank.
  std::function<void(std::uint32_t rank, ModelSpec& model, ToyOptions& options)> change_toy = {};
};

// Runs one engine per rank. Each rank has its own device and thread.
inline std::vector<RankRun> run_ranks(std::uint32_t count, const Config& config,
                                      const ToyOptions& options,
                                      const RankConditions& conditions = {}) {
  LocalWorld world(count, {.timeout_s = conditions.timeout_s, .sum = sum_in_order});
  std::vector<RankRun> runs(count);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      auto device = make_host_device({.memory_bytes = config.memory.device_bytes.value_or(64_MiB),
                                      .has_own_memory = options.has_own_memory});
      if (conditions.delay_us_max != 0)
        device = make_delayed_device(std::move(device), conditions.seed * count + rank,
                                     conditions.delay_us_max);
      const auto collectives = world.join(rank, *device);
      try {
        ModelSpec model = toy_model_of(options);
        ToyOptions own = options;
        own.rank = rank;
        if (conditions.change_toy) conditions.change_toy(rank, model, own);
        Config own_config = config;
        if (conditions.change) conditions.change(rank, own_config);
        const QueueDecorator delays = [&](std::unique_ptr<IoQueue> queue) {
          return make_fault_queue(std::move(queue), {.seed = conditions.seed * count + rank,
                                                     .delay_us_max = conditions.io_delay_us_max});
        };
        Engine engine = EngineOverQueue::make(
            own_config, model, *device, conditions.io_delay_us_max != 0 ? delays : QueueDecorator(),
            collectives.get());
        runs[rank].device_bytes = placement_of(engine).device_bytes();
        runs[rank].host_bytes = placement_of(engine).host_bytes();
        runs[rank].shadow_bytes = placement_of(engine).shadow_bytes;
        runs[rank].result = run_toy(engine, model, *device, config, own);
        if (conditions.closes) engine.close();
      } catch (const std::exception& error) {
        runs[rank].failure = error.what();
        collectives->abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return runs;
}

inline void expect_oracle_on_every_rank(const std::vector<RankRun>& runs, const ToyResult& expected,
                                        const std::string& what) {
  for (std::size_t rank = 0; rank < runs.size(); ++rank) {
    ASSERT_EQ(runs[rank].failure, "") << what << ", rank " << rank;
    expect_oracle(runs[rank].result, expected, what + ", rank " + std::to_string(rank));
  }
}

}  // namespace sluice::test
