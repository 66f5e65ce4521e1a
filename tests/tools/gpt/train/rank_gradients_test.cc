// Several ranks see what one rank sees that has as many micro-batches: losses and gradients of the
// GPT in fp32, step by step. Gradients are read from the state: with SGD without momentum exp_avg
// is the step's mean gradient.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <numeric>
#include <thread>

#include <fmt/format.h>

#include "cpu_optim/rank_sum.h"
#include "engine/plan/layout.h"
#include "gpu/ranks/local_collectives.h"
#include "tests/support/temp_directory.h"
#include "tests/tools/gpt/train/small_gpt.h"
#include "tools/gpt/train/host_trainer.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kSteps = 10;

struct TrainedGradients {
  std::vector<double> losses;                 // by step, of this rank
  std::vector<std::vector<float>> gradients;  // by step, of all tensors
};

std::vector<float> read_gradients(Engine& engine) {
  std::vector<float> all;
  for (const TensorPlace& tensor : engine.tensors()) {
    const std::size_t begin = all.size();
    all.resize(begin + tensor.element_count);
    engine.read_state(tensor.id, StateKind::kExpAvg, 0,
                      std::as_writable_bytes(std::span(all).subspan(begin)));
  }
  return all;
}

TrainedGradients train(const TrainConfig& config, const InitialValues& values,
                       Collectives* collectives, HostDevice& device) {
  const Dataset dataset(config, collectives == nullptr ? 1 : collectives->rank_count());
  Engine engine(config.engine, validated(training_model(config)), device, collectives);
  engine.initialize(values);
  HostTrainer trainer(config, dataset, engine, device);
  TrainedGradients trained;
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    trained.losses.push_back(trainer.train_step(step).loss);
    engine.drain();
    trained.gradients.push_back(read_gradients(engine));
  }
  return trained;
}

TrainConfig sgd_config(const TempDirectory& folder, std::uint32_t micro_batches) {
  TrainConfig config = small_train_config(folder.path(), DType::kFp32);
  config.data_file = folder.file("text");
  config.micro_batches = micro_batches;
  config.learning_rate = config.minimum_learning_rate = 0.1;
  config.engine.optimizer.kind = OptimizerKind::kSgd;
  config.engine.optimizer.momentum = 1e-30;  // the average is the gradient of the step
  config.engine.optimizer.adam.weight_decay = 0;
  config.engine.optimizer.clip_norm = 0;
  config.engine.threads = 1;
  return config;
}

std::vector<TrainedGradients> train_ranks(TrainConfig config, const InitialValues& values,
                                          std::uint32_t ranks) {
  config.engine.memory.device_bytes = 8_MiB;
  LocalWorld world(ranks, {.timeout_s = 60, .sum = sum_in_order});
  std::vector<TrainedGradients> results(ranks);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 16_MiB});
      const auto collectives = world.join(rank, *device);
      results[rank] = train(config, values, collectives.get(), *device);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

double norm(const std::vector<float>& values) {
  return std::sqrt(std::transform_reduce(
      values.begin(), values.end(), 0.0, std::plus<>(),
      [](float value) { return static_cast<double>(value) * static_cast<double>(value); }));
}

double relative_distance(const std::vector<float>& actual, const std::vector<float>& expected) {
  std::vector<float> difference(expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) difference[i] = actual[i] - expected[i];
  return norm(difference) / norm(expected);
}

TEST(RankGradients, AreThoseOfOneRankOnTheSameBatch) {
  const TempDirectory folder;
  {
    std::ofstream text(folder.file("text"));
    for (int i = 0; i < 2000; ++i) text << "in the beginning was unit " << i * i % 97 << ", ";
  }
  const SmallGpt values(small_train_config(folder.path(), DType::kFp32));  // for these alone
  for (const std::uint32_t ranks : {2u, 3u, 4u}) {
    const auto device = make_host_device({.memory_bytes = 16_MiB});
    const TrainedGradients expected =
        train(sgd_config(folder, ranks), values.initial_values(), nullptr, *device);
    for (std::uint32_t stage = 0; stage <= 3; ++stage) {
      TrainConfig config = sgd_config(folder, 1);
      config.engine.sharding.stage = stage;
      config.engine.sharding.keep_gathered_bytes = 0;
      if (stage == 1 || stage == 2) config.engine.placement.parameters = TierChoice::kAuto;
      if (ranks == 4) config.engine.sharding.group_ranks = 2;
      const auto runs = train_ranks(config, values.initial_values(), ranks);
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        const std::string what = fmt::format("{} ranks, stage {}, step {}", ranks, stage, step);
        double loss = 0;
        for (const TrainedGradients& run : runs) {
          loss += run.losses[step] / ranks;
          EXPECT_LE(relative_distance(run.gradients[step], expected.gradients[step]), 1e-5) << what;
        }
        EXPECT_NEAR(loss, expected.losses[step], 1e-5 * expected.losses[step]) << what;
      }
    }
    EXPECT_GT(relative_distance(expected.gradients[1], expected.gradients[0]), 1e-2)
        << "gradients that stay show nothing";
  }
}

}  // namespace
}  // namespace sluice::test
