// Worlds of more ranks than a machine holds: this process is one of them, the others are made up
// (tests/support/many_ranks.h). Messages between ranks have to go through at any number of them.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "tests/engine/ranks/sharding_cases.h"
#include "tests/support/many_ranks.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

constexpr double kLearningRate = 0.0123;
constexpr std::uint64_t kElements = 70'000;

ModelSpec two_units() {
  ModelSpec model;
  model.units = {{"first", {{"first.weight", {kElements}}}}, {"last", {{"last.bias", {300}}}}};
  return model;
}

struct World {
  explicit World(std::uint32_t rank_count, std::uint32_t stage, const OtherRank& other = {})
      : config(sharded_config(directory.path(), stage, false, DType::kFp32)),
        device(make_host_device({.memory_bytes = 128_MiB})),
        collectives(*device, /*rank=*/1, rank_count, other) {
    config.memory.device_bytes = 100_MiB;
    config.memory.host_bytes = 64_MiB;
    config.memory.check = RoomCheck::kOff;  // the other ranks are none, and take nothing
  }

  // Every gradient is 1.
  StepReport train_step(Engine& engine) const {
    const Stream stream(*device, "compute");
    Step step = engine.begin_step({.learning_rate = kLearningRate});
    for (const std::uint32_t unit : {0u, 1u})
      (void)step.acquire(UnitId{unit}, Pass::kForward, stream);
    for (const std::uint32_t unit : {1u, 0u}) {
      const Lease lease = step.acquire(UnitId{unit}, Pass::kBackward, stream);
      const std::uint64_t count = unit == 0 ? kElements : 300;
      auto* const gradient = reinterpret_cast<float*>(lease.gradient(0));
      device->launch(stream.id(), [=] { std::fill_n(gradient, count, 1.0f); });
    }
    return step.finish();
  }

  TempDirectory directory;
  Config config;
  ModelSpec model = validated(two_units());
  std::unique_ptr<HostDevice> device;
  ManyRanks collectives;
};

const InitialValues kZeros = [](const TensorPlace&, std::uint64_t, std::span<float> values) {
  std::ranges::fill(values, 0.0f);
};

// Replaces a word of 64 bits that is said, and its complement.
void replace_word(std::span<std::byte> said, std::uint64_t from, std::uint64_t to) {
  for (std::size_t at = 0; at + sizeof from <= said.size(); at += sizeof from) {
    std::uint64_t word = 0;
    std::memcpy(&word, &said[at], sizeof word);
    if (word != from && word != ~from) continue;
    const std::uint64_t other = word == from ? to : ~to;
    std::memcpy(&said[at], &other, sizeof other);
  }
}

class ManyRanksTest : public testing::TestWithParam<std::uint32_t> {};

INSTANTIATE_TEST_SUITE_P(Counts, ManyRanksTest, testing::Values(2u, 303u, 304u, 1024u, 4096u),
                         testing::PrintToStringParamName());

// Every other rank brings the norm of this one's shard.
TEST_P(ManyRanksTest, StepsAgreeOnTheNorm) {
  for (const std::uint32_t stage : {1u, 3u}) {
    const World world(GetParam(), stage);
    auto& collectives = const_cast<ManyRanks&>(world.collectives);
    Engine engine(world.config, world.model, *world.device, &collectives);
    engine.initialize(kZeros);
    double owned = 0;
    for (const UnitPlace& unit : layout_of(engine).units())
      if (unit.shard_begin < unit.payload_elements)
        owned += static_cast<double>(
            std::min(unit.shard_elements, unit.payload_elements - unit.shard_begin));
    ASSERT_GT(owned, 0);
    const double ranks = GetParam();
    for (std::uint64_t step = 1; step <= 2; ++step)
      EXPECT_EQ(world.train_step(engine).gradient_norm, std::sqrt(owned * ranks) / ranks)
          << "stage " << stage << ", step " << step;
    engine.drain();
  }
}

TEST_P(ManyRanksTest, RankWithAnotherLearningRateIsNamed) {
  const std::uint32_t odd = GetParam() == 2 ? 0 : GetParam() - 2;
  World world(GetParam(), 1,
              [odd](std::uint32_t rank, std::string_view, std::span<std::byte> said) {
                if (rank == odd)
                  replace_word(said, std::bit_cast<std::uint64_t>(kLearningRate),
                               std::bit_cast<std::uint64_t>(0.5));
              });
  Engine engine(world.config, world.model, *world.device, &world.collectives);
  engine.initialize(kZeros);
  try {
    (void)world.train_step(engine);
    FAIL() << "nobody has noticed";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kRanks);
    const std::string expected =
        "rank " + std::to_string(odd) + " is in step 1 with learning rate 0.5 and 1 horizontal " +
        "micro-batches, rank 1 in step 1 with learning rate 0.0123 and 1 horizontal " +
        "micro-batches; all must take equal steps";
    EXPECT_EQ(error.what(), expected);
  }
}

TEST_P(ManyRanksTest, RanksThatTrainSomethingElseAreNamed) {
  const std::uint32_t odd = GetParam() == 2 ? 0 : GetParam() - 1;
  World world(GetParam(), 3,
              [odd](std::uint32_t rank, std::string_view subject, std::span<std::byte> said) {
                if (rank != odd || subject != "the description of the run") return;
                said[3] ^= std::byte{1};
                if (said.size() > 8) said[11] ^= std::byte{1};  // the complement's
              });
  try {
    const Engine engine(world.config, world.model, *world.device, &world.collectives);
    FAIL() << "nobody has noticed";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kRanks);
    // Those that differ from rank 0; if that is the odd one, they are all the others.
    const std::string expected =
        "differs between rank 0 and rank " + std::to_string(odd == 0 ? 1 : odd) + ";";
    EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
  }
}

TEST_P(ManyRanksTest, EveryRanksValueComes) {
  World world(GetParam(), 1,
              [](std::uint32_t rank, std::string_view subject, std::span<std::byte> said) {
                if (subject != "the ranks' values") return;
                const double value = rank;
                ASSERT_EQ(said.size(), sizeof value);
                std::memcpy(said.data(), &value, sizeof value);
              });
  Engine engine(world.config, world.model, *world.device, &world.collectives);
  const std::vector<double> values = engine.exchange(1);
  ASSERT_EQ(values.size(), GetParam());
  for (std::uint32_t rank = 0; rank < values.size(); ++rank) ASSERT_EQ(values[rank], rank);
}

}  // namespace
}  // namespace sluice::test
