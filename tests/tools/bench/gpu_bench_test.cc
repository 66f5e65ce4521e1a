// The benchmarks of a GPU, run over the host device: they measure what they say, in small.
#include "tools/bench/gpu_bench.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "gpu/math/device_math_over.h"
#include "gpu/math/host_launcher.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/temp_directory.h"
#include "tests/tools/gpt/model/device_machine.h"
#include "tests/tools/gpt/train/small_gpt.h"
#include "tools/bench/bench_adam.h"
#include "tools/report/plan_rates.h"

namespace sluice {
namespace {

TEST(GpuSpread, IsMedianAndExtremes) {
  const GpuSpread spread = gpu_spread({3, 1, 2, 9, 5});
  EXPECT_EQ(spread.median, 3);
  EXPECT_EQ(spread.least, 1);
  EXPECT_EQ(spread.most, 9);
  EXPECT_EQ(gpu_spread({4, 1, 2, 9}).median, 3);
}

// A bus of 1 GB/s each way, and a plain loop that claims half of that.
TEST(GpuBench, CopiesOfBothDirectionsCountTwice) {
  const auto device =
      make_host_device({.memory_bytes = 64_MiB, .copy_bytes_per_second = 1'000'000'000});
  const CopyBenchOptions options{.size_bytes = 10'000'000, .unit_bytes = 4_MiB, .rounds = 2};
  std::vector<int> ways;
  const auto results = bench_copies(*device, options, [&](const PlainCopy& ends) {
    ways.push_back((ends.host_up != nullptr ? 1 : 0) + (ends.host_down != nullptr ? 2 : 0));
    return 0.02;
  });
  ASSERT_EQ(results.size(), 3u);
  EXPECT_EQ(ways, (std::vector<int>{1, 1, 2, 2, 3, 3}));
  EXPECT_EQ(results[0].direction, "up");
  EXPECT_EQ(results[1].direction, "down");
  EXPECT_EQ(results[2].direction, "both");
  EXPECT_NEAR(results[0].plain_gb_per_s.median, 0.5, 1e-9);
  EXPECT_NEAR(results[2].plain_gb_per_s.median, 1.0, 1e-9);
  for (const CopyBench& copies : results) {
    EXPECT_LE(copies.gb_per_s.most, copies.direction == "both" ? 2.0 : 1.0)
        << "faster than the bus";
    EXPECT_NEAR(copies.percent.most, 100 * copies.gb_per_s.most / copies.plain_gb_per_s.median,
                1e-6);
  }
}

// As the engine: one copy, one record and one report for a unit, however many blocks it has.
TEST(GpuBench, CopiesAUnitAtATime) {
  class CountingDevice final : public test::ForwardingDevice {
   public:
    using ForwardingDevice::ForwardingDevice;
    void copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
              StreamId stream) override {
      copied_bytes.push_back(size_bytes);
      ForwardingDevice::copy(target, source, size_bytes, stream);
    }
    void notify(StreamId stream, std::function<void()> function) override {
      ++reports;
      ForwardingDevice::notify(stream, std::move(function));
    }
    void call_host(StreamId, std::function<void()>) override { ADD_FAILURE() << "a callback"; }
    std::vector<std::uint64_t> copied_bytes;
    int reports = 0;
  };
  CountingDevice device(make_host_device({.memory_bytes = 64_MiB}));
  const CopyBenchOptions options{.size_bytes = 20_MiB, .unit_bytes = 8_MiB, .rounds = 1};
  (void)bench_copies(device, options, [&](const PlainCopy&) { return 1.0; });
  // Up, down and both, once to warm up and once counted.
  EXPECT_EQ(device.reports, 2 * 4 * 3);
  ASSERT_EQ(device.copied_bytes.size(), 2u * 4 * 3);
  EXPECT_EQ(device.copied_bytes[0], 8_MiB);
  EXPECT_EQ(device.copied_bytes[2], 4_MiB);
}

// A bus of 1 GB/s each way, beside moves that take 10 ms for what counts as 10 MB.
TEST(GpuBench, HostMemoryServesCopiesAndMovesAtOnce) {
  const auto device =
      make_host_device({.memory_bytes = 64_MiB, .copy_bytes_per_second = 1'000'000'000});
  int moves = 0;
  const HostMemoryBench memory =
      bench_host_memory(*device, {.size_bytes = 10'000'000, .unit_bytes = 4_MiB, .rounds = 2}, [&] {
        ++moves;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        return std::uint64_t{10'000'000};
      });
  EXPECT_GT(moves, 2);
  EXPECT_GT(memory.copy_gb_per_s.least, 0);
  EXPECT_LE(memory.copy_gb_per_s.most, 2.0) << "faster than the bus";
  EXPECT_GT(memory.gb_per_s.least, memory.copy_gb_per_s.least);
  EXPECT_LE(memory.gb_per_s.most, 3.0) << "more than both reach";
  // A failure of one side ends the other.
  EXPECT_THROW((void)bench_host_memory(
                   *device, {.size_bytes = 1'000'000, .unit_bytes = 1'000'000, .rounds = 1},
                   [n = 0]() mutable {
                     if (n++ == 1) throw std::runtime_error("no more");
                     return std::uint64_t{1};
                   }),
               std::runtime_error);
}

TEST(UpdateMoves, MovesWhatAnUpdateMoves) {
  UpdateMoves moves(kBenchCases[1], 1 << 12, 2);
  EXPECT_EQ(moves.move(), (1u << 12) * kAdamBytesPerParameter);
}

TEST(GpuBench, AdamIsComparedWithACopy) {
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  DeviceMathOver<HostLauncher> math{HostLauncher(*device)};
  const AdamKernelBench adam = bench_adam_kernel(*device, math, 1 << 16, 3);
  EXPECT_EQ(adam.parameters, 1u << 16);
  EXPECT_GT(adam.gb_per_s.least, 0);
  EXPECT_GT(adam.copy_gb_per_s.least, 0);
  EXPECT_GT(adam.percent.median, 0);
}

TEST(GpuBench, TrainingStepsAreMeasuredBesideComputationAlone) {
  const test::TempDirectory folder;
  TrainConfig config = test::small_train_config(folder.path(), DType::kBf16);
  config.data_file = folder.file("tokens");
  config.data_format = TokenFormat::kUint16;
  write_random_tokens(config.data_file, config.model.vocabulary, 4096);
  const gpt::DeviceMachine machine = gpt::host_machine().make(DType::kBf16, DType::kBf16);
  const Rates rates{.up_bytes_per_second = 1e9,
                    .down_bytes_per_second = 1e9,
                    .adam_parameters_per_second = 1e9,
                    .units = {}};
  const TrainingBench step = bench_training(config, *machine.device, *machine.ops, 2, rates);
  EXPECT_GT(step.compute_step_s, 0);
  EXPECT_NEAR(step.tokens_per_s * step.step_s.median, 2 * 8, 1e-6) << "two sequences of eight";
  EXPECT_NEAR(step.percent_of_compute, 100 * step.compute_step_s / step.step_s.median, 1e-6);
  EXPECT_GT(step.nvme_bytes, 0u);
  EXPECT_GT(step.device_pool_bytes, 0u);
  EXPECT_GT(step.activation_bytes, 0u);
  for (const std::uint64_t most : step.device_most_bytes) EXPECT_LE(most, step.device_pool_bytes);
  EXPECT_GT(step.device_most_bytes[static_cast<std::size_t>(StepPhase::kBackward)], 0u);
}

// A drive as slow as a bucket of bits binds the step: its bytes at its rate.
TEST(GpuBench, TheDriveIsAResourceToo) {
  const test::TempDirectory folder;
  Rates rates;
  const DriveMeasurement drive = measure_drive(folder.path(), 16_MiB, rates);
  EXPECT_GT(drive.interference, 0);
  Rates of_limits;
  set_storage_rates(drive.read, drive.write, drive.interference, of_limits);
  EXPECT_EQ(rates.read_bytes_per_second, of_limits.read_bytes_per_second);
  EXPECT_GT(rates.read_bytes_per_second, 1e6);
  EXPECT_GT(rates.write_bytes_per_second, 1e6);
  TrainConfig config = test::small_train_config(folder.path(), DType::kBf16);
  config.data_file = folder.file("tokens");
  config.data_format = TokenFormat::kUint16;
  write_random_tokens(config.data_file, config.model.vocabulary, 4096);
  const gpt::DeviceMachine machine = gpt::host_machine().make(DType::kBf16, DType::kBf16);
  const TrainingBench step =
      bench_training(config, *machine.device, *machine.ops, 1,
                     {.read_bytes_per_second = 1e9, .write_bytes_per_second = 1e3, .units = {}});
  EXPECT_GT(step.nvme_bytes, 0u);
  EXPECT_GE(step.t_min_s, static_cast<double>(step.nvme_bytes) / 2 * 10 / 12 / 1e3)
      << "of what two slots a block hold one is written, ten bytes of twelve at least";
}

// An optimizer of 10 k parameters a second is the scarcest resource of all.
TEST(GpuBench, StepsAreComparedWithTheScarcestResource) {
  const test::TempDirectory folder;
  TrainConfig config = test::small_train_config(folder.path(), DType::kBf16);
  config.engine.placement = {.parameters = TierChoice::kHost, .optimizer = TierChoice::kHost};
  config.data_file = folder.file("tokens");
  config.data_format = TokenFormat::kUint16;
  write_random_tokens(config.data_file, config.model.vocabulary, 4096);
  const gpt::DeviceMachine machine = gpt::host_machine().make(DType::kBf16, DType::kBf16);
  const double parameters = static_cast<double>(2 * (12 * 32 * 32 + 13 * 32) + 256 * 32 + 8 * 32 +
                                                2 * 32);  // small_gpt()
  const TrainingBench step = bench_training(config, *machine.device, *machine.ops, 1,
                                            {.adam_parameters_per_second = 1e4, .units = {}});
  EXPECT_GE(step.t_min_s, parameters / 1e4);
  EXPECT_LT(step.t_min_s, 1.2 * parameters / 1e4) << "padding is updated too";
  EXPECT_NEAR(step.percent_of_t_min, 100 * step.t_min_s / step.step_s.median, 1e-6);
  EXPECT_GE(step.t_bound_s, step.t_min_s) << "no schedule is shorter";
  EXPECT_NEAR(step.percent_of_t_bound, 100 * step.t_bound_s / step.step_s.median, 1e-6);
  const TrainingBench free = bench_training(config, *machine.device, *machine.ops, 1, Rates{});
  EXPECT_NEAR(free.t_min_s, free.compute_step_s, 1e-3 * free.compute_step_s)
      << "computation is all that takes time";
}

}  // namespace
}  // namespace sluice
