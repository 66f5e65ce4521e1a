// A state that one number of ranks leaves and another takes up: each rank asks for its own part,
// and all go on with the bits of one that had the state from the start.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <numeric>
#include <stdexcept>
#include <thread>

#include <sluice/checkpoint.h>
#include "engine/engine_access.h"
#include "io/direct_file.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/expect_error.h"
#include "tests/support/flip_bit.h"
#include "tests/support/memory_source.h"

namespace sluice::test {
namespace {

// Two steps of one rank in memory.
class RestoreOfRanks : public testing::Test {
 protected:
  static Config config_of(const TempDirectory& directory, std::uint32_t stage, bool uses_nvme) {
    return sharded_config(directory.path(), stage, uses_nvme, DType::kBf16);
  }

  TempDirectory directory_;
  Config config_ = config_of(directory_, 3, false);
  ModelSpec model_ = toy_model();
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  Engine engine_{config_, model_, *device_};
  ToyResult first_ = run_toy(engine_, model_, *device_, config_, {.steps = 2});
  MemorySource source_{engine_};
};

// Engines of `count` ranks, each with a source of its own; `body` gets both.
template <class Body>
void on_ranks(std::uint32_t count, const Config& config, Engine& from, const Body& body,
              double timeout_s = 60) {
  std::vector<std::unique_ptr<MemorySource>> sources;
  for (std::uint32_t rank = 0; rank < count; ++rank)
    sources.push_back(std::make_unique<MemorySource>(from));
  LocalWorld world(count, {.timeout_s = timeout_s, .sum = sum_in_order});
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      const auto collectives = world.join(rank, *device);
      try {
        Engine engine(config, toy_model(), *device, collectives.get());
        body(rank, engine, *device, *sources[rank]);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
        collectives->abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(RestoreOfRanks, AnyNumberAndStageGoesOnWithTheSameBits) {
  for (const std::uint32_t count : {2u, 3u}) {
    // The result of so many ranks, in the plainest way of all.
    StateBytes expected;
    for (const auto& [stage, uses_nvme] :
         {std::pair{0u, false}, {1u, true}, {2u, false}, {3u, true}}) {
      SCOPED_TRACE(std::to_string(count) + " ranks, stage " + std::to_string(stage));
      const TempDirectory directory;
      const Config config = config_of(directory, stage, uses_nvme);
      std::vector<StateBytes> states(count);
      std::vector<std::uint64_t> asked(count);
      on_ranks(
          count, config, engine_,
          [&](std::uint32_t rank, Engine& engine, HostDevice& device, MemorySource& source) {
            const ToyOptions options{
                .steps = 2, .evaluate = true, .rank = rank, .rank_count = count, .source = &source};
            states[rank] = run_toy(engine, toy_model(), device, config, options).state;
            asked[rank] = source.elements_read();
          });
      if (stage == 0) expected = states[0];
      for (const StateBytes& state : states) EXPECT_TRUE(state == expected);
      const std::uint64_t all = 3 * layout_of(engine_).parameter_count();
      if (stage == 0) continue;
      EXPECT_EQ(std::accumulate(asked.begin(), asked.end(), std::uint64_t{0}), all);
    }
  }
}

TEST_F(RestoreOfRanks, WhatIsRestoredReadsBackOnEveryRank) {
  on_ranks(3, config_, engine_,
           [&](std::uint32_t, Engine& engine, HostDevice&, MemorySource& source) {
             engine.restore(source);
             EXPECT_EQ(engine.position().step, 2u);
             EXPECT_TRUE(read_state(engine) == first_.state);
           });
}

TEST_F(RestoreOfRanks, SourcesAtDifferentStepsAreRefusedOnEveryRank) {
  on_ranks(2, config_, engine_,
           [&](std::uint32_t rank, Engine& engine, HostDevice&, MemorySource& source) {
             if (rank == 1) source.set_position({.step = 1});
             const std::string message =
                 expect_error(ErrorCode::kRanks, [&] { engine.restore(source); });
             EXPECT_NE(message.find("the position of the training"), std::string::npos) << message;
           });
}

// The exception of one rank, whatever it is, ends the call on all, and a good source is taken then.
TEST_F(RestoreOfRanks, AnExceptionOfOneRankIsAFailureOnEveryRank) {
  class Throwing final : public StateSource {
   public:
    explicit Throwing(StateSource& inner) : inner_(inner) {}
    StatePosition position() const override { return inner_.position(); }
    void read(const TensorPlace&, StateKind, std::uint64_t, std::span<float>) override {
      throw std::range_error("no error of Sluice");
    }

   private:
    StateSource& inner_;
  };
  on_ranks(2, config_, engine_,
           [&](std::uint32_t rank, Engine& engine, HostDevice&, MemorySource& source) {
             if (rank == 1) {
               Throwing throwing(source);
               EXPECT_THROW(engine.restore(throwing), std::range_error);
             } else {
               const std::string message =
                   expect_error(ErrorCode::kInternal, [&] { engine.restore(source); });
               EXPECT_NE(message.find("another rank has failed"), std::string::npos) << message;
             }
             engine.restore(source);
             EXPECT_TRUE(read_state(engine) == first_.state);
           });
}

// All ranks need what each of them has. One whose drive brings other bytes does not let the others
// wait, and all go on when its bytes are right again.
TEST_F(RestoreOfRanks, AReadOfTheStateThatFailsOnOneRankFailsOnEveryRank) {
  Config config = config_of(directory_, 1, true);
  config.optimizer.overlap = OverlapPolicy::kSerial;
  on_ranks(2, config, engine_,
           [&](std::uint32_t rank, Engine& engine, HostDevice& device, MemorySource& source) {
             engine.restore(source);
             const auto flip_all = [&] {
               if (rank == 0) return;
               for (const DirectFile& file : storage_files_of(engine)) {
                 for (std::uint64_t at = 0; at < file.size_bytes(); at += kFlipPageBytes)
                   flip_bit(file.descriptor(), at);
               }
             };
             flip_all();
             const std::string message =
                 expect_error(ErrorCode::kDamaged, [&] { (void)read_state(engine); });
             EXPECT_NE(message.find(rank == 1 ? "read of unit" : "another rank has failed"),
                       std::string::npos)
                 << message;
             flip_all();
             EXPECT_TRUE(read_state(engine) == first_.state);
             // Reads of the state, also those that fail, are no traffic of a step.
             Step step = engine.begin_step({.learning_rate = 1e-2});
             const Stream stream(device, "compute");
             walk_step(step, toy_model(), engine, device, stream, config, 1);
             EXPECT_EQ(step.finish().nvme_read_bytes, engine.predicted_traffic(1).nvme_read_bytes);
           });
}

// Digests of a large file take longer than a rank waits for another.
TEST_F(RestoreOfRanks, RanksWaitForOneThatReadsItsFilesForLongerThanTheTimeout) {
  const std::string digest(64, 'a');
  on_ranks(
      2, config_, engine_,
      [&](std::uint32_t rank, Engine& engine, HostDevice&, MemorySource& source) {
        engine.restore(source);
        std::atomic<int> files = 0;
        SaveOptions options;
        options.sha256 = [&](const FileRanges& file) {
          if (rank == 0 && files++ == 0) std::this_thread::sleep_for(std::chrono::seconds(5));
          return std::vector<std::string>(file.ranges.size(), digest);
        };
        const SavedCheckpoint saved = engine.save(directory_.path() + "/kept", options);
        EXPECT_EQ(saved.step, 2u);
      },
      /*timeout_s=*/2);
}

TEST_F(RestoreOfRanks, DigestsThatAreNoSha256AreRefused) {
  const std::string root = directory_.path() + "/kept";
  for (const std::string& digest :
       {std::string(), std::string(" "), std::string(63, 'a'), std::string(63, 'a') + " "}) {
    SaveOptions options;
    options.sha256 = [&](const FileRanges& file) {
      return std::vector<std::string>(file.ranges.size(), digest);
    };
    const std::string message =
        expect_error(ErrorCode::kInvalidArgument, [&] { (void)engine_.save(root, options); });
    EXPECT_NE(message.find("returned \"" + digest + "\" for \"" + root), std::string::npos)
        << message;
    EXPECT_NE(message.find("/model-00001-of-00001.safetensors\" [0, +"), std::string::npos)
        << message;
    EXPECT_FALSE(std::filesystem::exists(root + "/latest"));
  }
  SaveOptions options;
  options.sha256 = [&](const FileRanges&) { return std::vector<std::string>(1, "a"); };
  const std::string message =
      expect_error(ErrorCode::kInvalidArgument, [&] { (void)engine_.save(root, options); });
  EXPECT_NE(message.find("returned 1 digests for "), std::string::npos) << message;
}

}  // namespace
}  // namespace sluice::test
