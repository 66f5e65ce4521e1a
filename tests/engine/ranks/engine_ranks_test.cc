// An engine leaves nothing with the collectives that outlive it, also where its constructor throws.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/error.h>
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/delays.h"
#include "tests/support/expect_error.h"

namespace sluice::test {
namespace {

// Everything that the sequences of a rank have been told and not told to forget.
struct Held {
  std::atomic<bool> has_handler = false;
  std::atomic<bool> ever_had_handler = false;
  std::atomic<int> memories = 0;
  std::atomic<int> memories_ever = 0;
};

class Listening final : public Collectives {
 public:
  Listening(std::unique_ptr<Collectives> inner, Held& held)
      : inner_(std::move(inner)), held_(held) {}

  std::string_view name() const override { return inner_->name(); }
  std::uint32_t rank() const override { return inner_->rank(); }
  std::uint32_t rank_count() const override { return inner_->rank_count(); }
  void all_gather(const AllGather& gather, StreamId stream) override {
    inner_->all_gather(gather, stream);
  }
  void reduce_scatter(const ReduceScatter& reduce, StreamId stream) override {
    inner_->reduce_scatter(reduce, stream);
  }
  void all_reduce(const AllReduce& reduce, StreamId stream) override {
    inner_->all_reduce(reduce, stream);
  }
  void all_reduce_integers(const AllReduceIntegers& reduce, StreamId stream) override {
    inner_->all_reduce_integers(reduce, stream);
  }
  void broadcast(const Broadcast& broadcast, StreamId stream) override {
    inner_->broadcast(broadcast, stream);
  }
  void barrier(std::string_view subject, StreamId stream) override {
    inner_->barrier(subject, stream);
  }
  std::unique_ptr<Collectives> open(std::span<const std::uint32_t> ranks) override {
    return std::make_unique<Listening>(inner_->open(ranks), held_);
  }
  void use_memory(std::span<std::byte> memory) override {
    ++held_.memories;
    ++held_.memories_ever;
    ++own_memories_;
    inner_->use_memory(memory);
  }
  void forget_memory() noexcept override {
    held_.memories -= std::exchange(own_memories_, 0);
    inner_->forget_memory();
  }
  void on_failure(std::function<void(const Error&)> handler) override {
    held_.has_handler = static_cast<bool>(handler);
    if (handler) held_.ever_had_handler = true;
    inner_->on_failure(std::move(handler));
  }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }

 private:
  std::unique_ptr<Collectives> inner_;
  Held& held_;
  int own_memories_ = 0;
};

// Two ranks; the second one's optimizer is `second`'s. Returns what each has been left with.
void run_two(const Config& config, const Config& second, std::vector<Held>& held,
             bool is_to_agree) {
  LocalWorld world(2, {.timeout_s = 60, .sum = sum_in_order});
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      Listening collectives(world.join(rank, *device), held[rank]);
      const ModelSpec model = toy_model();
      const auto make = [&] {
        Engine engine(rank == 0 ? config : second, model, *device, &collectives);
        if (is_to_agree) {
          EXPECT_TRUE(held[rank].has_handler);
          EXPECT_GT(held[rank].memories, 0);
        }
      };
      if (is_to_agree) {
        make();
      } else {
        (void)expect_error(ErrorCode::kRanks, make);
      }
      EXPECT_TRUE(held[rank].ever_had_handler);
      EXPECT_FALSE(held[rank].has_handler) << "rank " << rank;
      EXPECT_EQ(held[rank].memories, 0) << "rank " << rank;
      collectives.abort("the end");  // with a handler that is gone, use after free
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Calls `body(rank, engine)` on two ranks that are threads, each with an engine that has values.
template <class Body>
void on_two_ranks(const Body& body) {
  const TempDirectory directory;
  const Config config = toy_config(directory.path());
  LocalWorld world(2, {.timeout_s = 60, .sum = sum_in_order});
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      const std::unique_ptr<Collectives> collectives = world.join(rank, *device);
      const ModelSpec model = toy_model();
      Engine engine(config, model, *device, collectives.get());
      engine.initialize(toy_values());
      body(rank, engine);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(EngineRanks, OtherValuesForDifferentTensorsAreRefused) {
  on_two_ranks([](std::uint32_t rank, Engine& engine) {
    engine.replace_values(std::vector{TensorId{1}}, toy_values());
    const std::string message = expect_error(ErrorCode::kRanks, [&] {
      engine.replace_values(std::vector{TensorId{rank}}, toy_values());
    });
    EXPECT_NE(message.find("the list of tensors that get other values differs"), std::string::npos)
        << message;
  });
}

// The other rank has the new values by then.
TEST(EngineRanks, OtherValuesThatOneRankCannotGiveStopAll) {
  on_two_ranks([](std::uint32_t rank, Engine& engine) {
    const InitialValues none;
    (void)expect_error(ErrorCode::kInvalidArgument, [&] {
      engine.replace_values(std::vector{TensorId{1}}, rank == 0 ? toy_values() : none);
    });
    engine.replace_values(std::vector{TensorId{1}}, toy_values());
    const InitialValues fails = [](const TensorPlace&, std::uint64_t, std::span<float>) {
      throw Error(ErrorCode::kInput, "no more values");
    };
    const std::string words = expect_error(ErrorCode::kInput, [&] {
      engine.replace_values(std::vector{TensorId{1}}, rank == 0 ? toy_values() : fails);
    });
    EXPECT_NE(words.find(rank == 0 ? "another rank" : "no more values"), std::string::npos)
        << words;
    EXPECT_NE(expect_error(ErrorCode::kPoisoned, [&] { (void)engine.begin_step({}); })
                  .find("the ranks' parameters may differ"),
              std::string::npos);
  });
}

TEST(EngineRanks, AConstructorThatThrowsLeavesNothingBehind) {
  const TempDirectory directory;
  const Config config = toy_config(directory.path());
  Config other = config;
  other.optimizer.adam.beta1 = 0.8;
  std::vector<Held> held(2);
  run_two(config, other, held, /*is_to_agree=*/false);
}

TEST(EngineRanks, AnEngineThatEndsLeavesNothingBehind) {
  const TempDirectory directory;
  const Config config = toy_config(directory.path());
  std::vector<Held> held(2);
  run_two(config, config, held, /*is_to_agree=*/true);
  for (const Held& rank : held) EXPECT_GT(rank.memories_ever, 0);
}

// Computation on one rank throws what is no Error, and every rank leaves its evaluation halfway:
// the ranks' vote about that throws where nothing may, and the engines end all the same.
TEST(EngineRanks, AnEvaluationWhoseComputationThrowsEndsWithoutAWord) {
  const Watchdog watchdog(std::chrono::minutes(1), "an evaluation that has failed does not end");
  const TempDirectory directory;
  Config config = sharded_config(directory.path(), 3, true, DType::kBf16);
  config.memory.device_bytes = 400_KiB;
  LocalWorld world(2, {.timeout_s = 1, .sum = sum_in_order});
  const ModelSpec model = toy_model();
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = *config.memory.device_bytes});
      const auto collectives = world.join(rank, *device);
      Engine engine(config, model, *device, collectives.get());
      engine.initialize(toy_values());
      const Stream stream(*device, "compute");
      {
        Inference inference = engine.begin_inference();
        (void)inference.acquire(UnitId{0}, stream);
        if (rank == 0) {
          device->launch(stream.id(), [] { throw std::runtime_error("out of cheese"); });
          EXPECT_THROW(device->synchronize(stream.id()), std::runtime_error);
        }
      }
      EXPECT_ANY_THROW((void)engine.begin_inference()) << "rank " << rank;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace sluice::test
