// Durable stores between two runs with other settings: pairs of configs that are drawn at random,
// and numbers that change between the runs.
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <iterator>
#include <random>

#include <fmt/format.h>

#include <sluice/units.h>
#include "tests/engine/exactness_cases.h"
#include "tests/support/campaign.h"
#include "tests/support/memory_source.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

class DurablePairs : public testing::Test {
 protected:
  struct Drawn {
    Config config;
    bool is_gpu = false;
    std::string words;
  };

  DurablePairs() {
    for (const char* name : {"/a", "/b"}) {
      paths_.push_back(directory_.path() + name);
      std::filesystem::create_directory(paths_.back());
    }
  }

  // Everything that may change between two runs of a store: placement, budgets, paths and their
  // shares of the bytes, policy, threads, the queue, verification, and the commits' distance.
  Drawn draw(std::mt19937_64& random, const std::string& name) const {
    const auto any = [&](auto&& all) { return all[random() % std::size(all)]; };
    const Case& placement = kCases[random() % std::size(kCases)];
    Config config = toy_config(paths_[0]);
    placement.change(config);
    if (config.memory.host_bytes) *config.memory.host_bytes += 200_KiB;  // commit buffers
    config.storage.block_elements = 4096;
    config.storage.paths = paths_;
    if (random() % 2 == 0) std::swap(config.storage.paths[0], config.storage.paths[1]);
    if (random() % 2 == 0) config.storage.weights = {3, 1};
    config.storage.backend =
        any(std::array{IoBackend::kAuto, IoBackend::kSync, IoBackend::kThreads});
    config.storage.queue_depth = any(std::array{1u, 4u, 32u});
    config.storage.verify = any(std::array{Verify::kFull, Verify::kSample, Verify::kOff});
    config.storage.state = {.name = name, .commit_every = any(std::array{1u, 2u, 5u})};
    config.optimizer.overlap =
        any(std::array{OverlapPolicy::kSerial, OverlapPolicy::kDeferred, OverlapPolicy::kEager});
    config.optimizer.clip_norm = 0;  // so that every policy may be tried
    config.threads = any(std::array{1u, 2u, 3u});
    return {
        .config = config,
        .is_gpu = placement.is_gpu,
        .words = fmt::format("{}, {}, every {}", placement.name, name_of(config.optimizer.overlap),
                             config.storage.state.commit_every)};
  }

  ToyResult run(const Drawn& drawn, std::uint32_t steps, bool closes) const {
    const ModelSpec model = toy_model();
    const auto device =
        make_host_device({.memory_bytes = drawn.config.memory.device_bytes.value_or(64_MiB),
                          .has_own_memory = drawn.is_gpu});
    Engine engine(drawn.config, model, *device);
    ToyResult result = run_toy(engine, model, *device, drawn.config, {.steps = steps});
    if (closes) engine.close();
    return result;
  }

  static void walk(Engine& engine, HostDevice& device, const Config& config) {
    const Stream stream(device, "compute");
    Step next = engine.begin_step({.learning_rate = 1e-2});
    walk_step(next, toy_model(), engine, device, stream, config, 1);
    (void)next.finish();
  }

  TempDirectory directory_;
  std::vector<std::string> paths_;
};

// Every other first run ends as if it were killed: without close().
TEST_F(DurablePairs, OfAnyConfigsGoOnWithTheSameBits) {
  const Campaign cases = campaign(10);
  for (const std::uint64_t seed : seeds_of(cases)) {
    std::mt19937_64 random(seed);
    const std::string name = fmt::format("pair-{}", seed);
    const Drawn before = draw(random, name);
    const Drawn after = draw(random, name);
    SCOPED_TRACE(fmt::format("SLUICE_TEST_SEED={}: {}; then {}", seed, before.words, after.words));
    const auto first = static_cast<std::uint32_t>(1 + random() % 6);
    const auto second = static_cast<std::uint32_t>(1 + random() % 4);
    const bool closes = random() % 2 == 0;
    (void)run(before, first, closes);
    const ToyResult result = run(after, second, /*closes=*/true);
    const std::uint64_t step = result.reports.back().step;
    ASSERT_LE(step, first + second);
    if (closes) {
      ASSERT_EQ(step, first + second);
    }
    ASSERT_GE(step + before.config.storage.state.commit_every + 1, first + second);
    const ToyResult expected =
        toy_oracle(after.config, {.steps = static_cast<std::uint32_t>(step)});
    ASSERT_TRUE(result.state == expected.state);
    for (const std::string& path : paths_)
      for (const auto& entry : std::filesystem::directory_iterator(path))
        std::filesystem::remove(entry.path());
  }
}

// A run that goes on from a store with other numbers has the bits of one that got the numbers at
// the same step and never stopped: here its state went from one engine to the next in memory.
TEST_F(DurablePairs, AcceptedNumbersCountFromTheStepOn) {
  Config before = toy_config(paths_[0]);
  before.optimizer.clip_norm = 0.5;
  Config after = before;
  after.optimizer.adam.beta2 = 0.75;
  after.optimizer.adam.weight_decay = 0.25;
  after.optimizer.clip_norm = 200;
  const auto device = [] { return make_host_device({.memory_bytes = 64_MiB}); };
  const auto whole_device = device();
  const auto next_device = device();
  const auto unchanged_device = device();
  Engine whole(before, toy_model(), *whole_device);
  (void)run_toy(whole, toy_model(), *whole_device, before, {.steps = 3});
  MemorySource source(whole);
  Engine next(after, toy_model(), *next_device);
  next.restore(source);
  Engine unchanged(before, toy_model(), *unchanged_device);
  unchanged.restore(source);
  for (int step = 0; step < 2; ++step) {
    walk(next, *next_device, after);
    walk(unchanged, *unchanged_device, before);
  }
  EXPECT_FALSE(read_state(unchanged) == read_state(next));

  before.storage.state = after.storage.state = {.name = "run-7"};
  {
    const auto first_device = device();
    Engine first(before, toy_model(), *first_device);
    (void)run_toy(first, toy_model(), *first_device, before, {.steps = 3});
    first.close();
  }
  const auto second_device = device();
  Engine second(after, toy_model(), *second_device);
  const OpenedState opened = second.open_or_create(toy_values(), {.accepts_changes = true});
  EXPECT_EQ(opened.step, 3u);
  EXPECT_EQ(opened.changes.size(), 3u);
  for (int step = 0; step < 2; ++step) walk(second, *second_device, after);
  EXPECT_TRUE(read_state(second) == read_state(next));
}

}  // namespace
}  // namespace sluice::test
