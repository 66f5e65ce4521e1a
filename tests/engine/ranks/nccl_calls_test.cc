// The engine while calls of NCCL take long, and when they fail, over the stand-ins. The scheduler
// goes on meanwhile, and each failure is an error of the ranks, or does no harm. Ranks are threads
// of one process. Runs without a GPU.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "cpu_optim/rank_sum.h"
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "gpu/ranks/local_collectives.h"
#include "gpu/ranks/nccl_collectives.h"
#include "tests/engine/ranks/sharding_cases.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"
#include "tests/gpu/ranks/fake_nccl.h"
#include "tests/support/campaign.h"
#include "tests/support/hang_guard.h"
#include "tests/support/temp_directory.h"
#include "tests/support/typed_elements.h"

namespace sluice::test {
namespace {

constexpr std::uint32_t kRanks = 2;
constexpr std::uint64_t kSteps = 2;

// While it exists, operations of NCCL do not come to their streams.
class Held {
 public:
  Held() { hold_fake_nccl(FAKE_NCCL, 1); }
  ~Held() { hold_fake_nccl(FAKE_NCCL, -1); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
};

// As computation would leave it on the device. Uneven, so that the order of ranks shows.
void bring_gradient(Device& device, StreamId stream, std::byte* target, std::uint64_t key,
                    std::uint64_t count) {
  AlignedBuffer source(count * sizeof(float), "a gradient");
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t bits = i * 2654435761u + key * 40503u;
    save(DType::kFp32, source.data(), i,
         (static_cast<float>(bits % 2001) - 1000.0f) * (bits % 5 == 0 ? 0x1p-4f : 0x1p-20f));
  }
  device.register_host_memory(source.span());
  try {
    device.copy(target, source.data(), count * sizeof(float), stream);
    device.synchronize(stream);
  } catch (const Error&) {
    device.unregister_host_memory(source.span());
    throw;
  }
  device.unregister_host_memory(source.span());
}

// How often NCCL answered "in progress" because a rank held it, since the test last set this to 0.
// The ranks that hold NCCL wait a moment for the first such answer: without any, nothing would have
// taken long.
std::atomic<int> held_questions = 0;
void await_a_held_question() {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
  while (held_questions == 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    held_questions += take_fake_nccl_counts(FAKE_NCCL).held_questions;
  }
}

// At stage 0 a step has two micro-batches, whose sum the ranks add.
std::uint32_t micro_batches(const Config& config) {
  return config.sharding.stage == 0 ? 2 : 1;
}

// With `holds`, NCCL takes long for a rank's gathers at the begin of each step, and for each
// reduction. Meanwhile the scheduler runs the tasks of this thread.
StateBytes train(const Config& config, Device& device, Collectives& collectives, bool holds) {
  const ModelSpec model = validated(toy_model());
  Engine engine(config, model, device, &collectives);
  engine.initialize(toy_values());
  const Stream stream(device, "compute");
  const auto with_nccl_held = [&](const auto& body) {
    std::optional<Held> held;
    if (holds) held.emplace();
    body();
    (void)engine.applied_step();
    if (holds) await_a_held_question();
  };
  const auto backward = [&](Step& step, UnitId unit, std::uint64_t key) {
    std::optional<Lease> lease = step.acquire(unit, Pass::kBackward, stream);
    const auto tensors = layout_of(engine).tensors_of(unit);
    for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor)
      bring_gradient(device, stream.id(), lease->gradient(tensor), key + 13 * tensor,
                     tensors[tensor].element_count);
    with_nccl_held([&] { lease.reset(); });
  };
  for (std::uint64_t number = 0; number < kSteps; ++number) {
    std::optional<Step> step;
    with_nccl_held([&] {
      step.emplace(
          engine.begin_step({.learning_rate = 1e-2, .micro_batches = micro_batches(config)}));
    });
    for (std::uint32_t batch = 0; batch < micro_batches(config); ++batch) {
      for (const UnitId unit : model.forward_order)
        (void)step->acquire(unit, Pass::kForward, stream);
      for (const UnitId unit : model.backward_order)
        backward(*step, unit, engine.rank() + 7 * number + 31 * index_of(unit) + 211 * batch);
    }
    (void)step->finish();
  }
  return read_state(engine);
}

// The oracle.
StateBytes on_hosts(const Config& config) {
  LocalWorld world(kRanks, {.timeout_s = 60, .sum = sum_in_order});
  std::vector<StateBytes> states(kRanks);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 32_MiB});
      const auto collectives = world.join(rank, *device);
      states[rank] = train(config, *device, *collectives, /*holds=*/false);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(states[1] == states[0]);
  return states[0];
}

struct RankResult {
  StateBytes state;
  std::optional<Error> failure;
};

Config config_of(std::uint32_t stage, const TempDirectory& folder) {
  Config config = sharded_config(folder.path(), stage, /*uses_nvme=*/false, DType::kFp32);
  config.memory.device_bytes = 4_MiB;
  return config;
}

std::vector<RankResult> run_ranks(const Config& config, double timeout_s, bool holds = false) {
  std::vector<RankResult> results(kRanks);
  const auto run = [&](const NcclId& id, std::uint32_t rank) {
    try {
      const auto device = make_cuda_device({.ordinal = static_cast<int>(rank) + 1,
                                            .memory_bytes = 64_MiB,
                                            .memory_source = nccl_memory_source(FAKE_NCCL)});
      const auto collectives = make_nccl_collectives(
          *device, {.timeout_s = timeout_s, .library = FAKE_NCCL}, id, rank, kRanks);
      results[rank].state = train(config, *device, *collectives, holds);
    } catch (const Error& error) {
      results[rank].failure = error;
    }
  };
  try {
    const NcclId id = make_nccl_id(FAKE_NCCL);
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) threads.emplace_back(run, id, rank);
    for (std::thread& thread : threads) thread.join();
  } catch (const Error& error) {
    for (RankResult& result : results) result.failure = error;
  }
  return results;
}

// Where the scheduler waited for NCCL, it would wait until the timeout, and the ranks would fail.
TEST(NcclCalls, TheSchedulerGoesOnWhileNcclTakesLong) {
  for (const std::uint32_t stage : {0u, 2u, 3u}) {
    const TempDirectory folder;
    const Config config = config_of(stage, folder);
    const StateBytes expected = on_hosts(config);
    (void)take_fake_nccl_counts(FAKE_NCCL);
    held_questions = 0;
    const std::vector<RankResult> actual = run_ranks(config, 20, /*holds=*/true);
    EXPECT_GT(held_questions, 0) << "stage " << stage;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_FALSE(actual[rank].failure)
          << "stage " << stage << ": " << actual[rank].failure->what();
      EXPECT_TRUE(actual[rank].state == expected) << "stage " << stage;
    }
  }
}

// A stage with the bits of a run without failures, and the calls of such a run.
struct Faultless {
  explicit Faultless(std::uint32_t stage) : config(config_of(stage, folder)) {
    for (const bool is_poll : {false, true}) {
      (void)fail_fake_nccl(FAKE_NCCL, {.is_poll = is_poll});
      for (const RankResult& result : run_ranks(config, 60)) EXPECT_TRUE(result.state == state);
      (is_poll ? questions : calls) = fail_fake_nccl(FAKE_NCCL, {});
    }
  }

  const TempDirectory folder;
  const Config config;
  const StateBytes state = on_hosts(config);
  std::uint64_t calls = 0;
  std::uint64_t questions = 0;
};

// Calls all over training, or questions for errors in the background, on whichever rank makes them.
TEST(NcclCalls, ACallThatFailsInTrainingIsAnErrorOrDoesNoHarm) {
  std::array<std::optional<Faultless>, 4> faultless;
  unsigned errors = 0;
  unsigned cases = 0;
  for (const std::uint64_t seed : seeds_of(campaign(15))) {
    std::optional<Faultless>& stage = faultless[seed % 4];
    if (!stage) stage.emplace(static_cast<std::uint32_t>(seed % 4));
    const std::uint64_t allocated = fake_cuda_allocated_bytes();
    const bool is_poll = seed / 4 % 4 == 3;
    const std::uint64_t at =
        1 + seed * 0x9e3779b97f4a7c15u % (is_poll ? stage->questions : stage->calls);
    const std::string what =
        fmt::format("seed {}: stage {}, {} {}", seed, seed % 4, is_poll ? "question" : "call", at);
    SCOPED_TRACE(what);
    const HangGuard guard(what);
    (void)fail_fake_nccl(FAKE_NCCL, {.at_call = at, .is_poll = is_poll});
    // Short, because a rank that never joins is noticed by the time alone.
    const std::vector<RankResult> results = run_ranks(stage->config, 3);
    (void)fail_fake_nccl(FAKE_NCCL, {});
    ++cases;
    for (const RankResult& result : results) {
      if (!result.failure) {
        EXPECT_TRUE(result.state == stage->state) << "a silent wrong";
        continue;
      }
      ++errors;
      const std::string said = result.failure->what();
      EXPECT_TRUE(result.failure->code() == ErrorCode::kRanks ||
                  said.find("out of memory") != std::string::npos ||
                  said.find(" free of ") != std::string::npos)
          << said;
    }
    EXPECT_EQ(fake_cuda_allocated_bytes(), allocated);
  }
  EXPECT_GT(errors, cases / 2);
}

}  // namespace
}  // namespace sluice::test
