// The parallel driver: thread counts and cuts change no bit, and several callers get along.
#include <sched.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <sluice/error.h>
#include "base/aligned_buffer.h"
#include "cpu_optim/cpu_optimizer.h"
#include "cpu_optim/worker_arena.h"
#include "tests/cpu_optim/optimizer_data.h"

namespace sluice {
namespace {

constexpr std::uint64_t kLarge = 5 * 32768 + 77;
constexpr unsigned kThreadCounts[] = {1, 2, 4};

// Four threads at once even where fewer cores were granted.
class CpuOptimizerTest : public ::testing::Test {
 private:
  tbb::global_control control_{tbb::global_control::max_allowed_parallelism, 4};
};

TEST_F(CpuOptimizerTest, ThreadsAndCutsGiveTheSameBits) {
  for (const MasterLayout layout :
       {MasterLayout::kFp32, MasterLayout::kSplitBf16, MasterLayout::kFp16}) {
    for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (const std::uint64_t count :
           std::initializer_list<std::uint64_t>{0, 1, 32767, 32768, 32769, kLarge}) {
        const OptimizerData start({.master_layout = layout,
                                   .gradient_dtype = dtype,
                                   .element_count = count,
                                   .offset_elements = 16});
        OptimizerData expected = start;
        update_reference(test_coefficients(), expected.arrays());
        for (const unsigned threads : kThreadCounts) {
          CpuOptimizer optimizer(threads);
          EXPECT_EQ(optimizer.threads(), threads);
          OptimizerData whole = start;
          optimizer.update(test_coefficients(), whole.arrays());
          ASSERT_EQ(whole.difference(expected), "") << threads << " threads";
          OptimizerData cut = start;
          const std::uint64_t middle = count / 3 / 16 * 16;
          optimizer.update(test_coefficients(), slice(cut.arrays(), middle, count - middle));
          optimizer.update(test_coefficients(), slice(cut.arrays(), 0, middle));
          ASSERT_EQ(cut.difference(expected), "") << threads << " threads";
        }
      }
    }
  }
}

TEST_F(CpuOptimizerTest, HeldToAPaceItTakesNoLessAndGivesTheSameBits) {
  const OptimizerData start({.element_count = kLarge});
  OptimizerData expected = start;
  update_reference(test_coefficients(), expected.arrays());
  CpuOptimizer optimizer(2);
  OptimizerData paced = start;
  CpuOptimizer::set_update_pace(2 * kLarge);
  const auto began = std::chrono::steady_clock::now();
  optimizer.update(test_coefficients(), paced.arrays());
  const auto took = std::chrono::steady_clock::now() - began;
  CpuOptimizer::set_update_pace(0);
  EXPECT_GE(took, std::chrono::milliseconds(499));  // half a second, rounded down
  EXPECT_EQ(paced.difference(expected), "");
}

TEST_F(CpuOptimizerTest, GradientOperationsGiveTheSameBits) {
  constexpr std::uint64_t kCount = 40 * 32768 + 77;
  std::mt19937 random(2);
  std::vector<float> start;
  std::vector<float> source;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    start.push_back(value(Values::kOrdinary, 0.1f, random));
    source.push_back(value(Values::kOrdinary, 0.1f, random));
  }
  std::vector<float> expected = start;
  accumulate_gradient_reference(DType::kFp32, expected.data(), source.data(), kCount);
  NormAccumulator expected_norm;
  add_squared_norm_reference(DType::kFp32, expected.data(), kCount, expected_norm);
  for (const unsigned threads : kThreadCounts) {
    CpuOptimizer optimizer(threads);
    std::vector<float> actual = start;
    optimizer.accumulate(DType::kFp32, actual.data(), source.data(), kCount);
    EXPECT_EQ(actual, expected) << threads;
    NormAccumulator norm;
    optimizer.add_squared_norm(DType::kFp32, actual.data(), kCount, norm);
    EXPECT_EQ(norm.sum_of_squares(), expected_norm.sum_of_squares()) << threads;
    actual = start;
    NormAccumulator fused;
    optimizer.accumulate_with_norm(DType::kFp32, actual.data(), source.data(), kCount, fused);
    EXPECT_EQ(actual, expected) << threads;
    EXPECT_EQ(fused.words(), expected_norm.words()) << threads;
    // Adds to what is there, and a bad value anywhere is seen.
    optimizer.add_squared_norm(DType::kFp32, actual.data(), kCount, norm);
    EXPECT_EQ(norm.sum_of_squares(), 2 * expected_norm.sum_of_squares()) << threads;
    actual[kCount - 1] = HUGE_VALF;
    optimizer.add_squared_norm(DType::kFp32, actual.data(), kCount, norm);
    EXPECT_FALSE(norm.finite());
  }
}

TEST_F(CpuOptimizerTest, SeveralCallersShareOneOptimizer) {
  CpuOptimizer optimizer(2);
  const OptimizerData start({.element_count = kLarge});
  OptimizerData expected = start;
  update_reference(test_coefficients(), expected.arrays());
  std::vector<OptimizerData> states(3, start);
  std::vector<std::thread> callers;
  for (OptimizerData& state : states)
    callers.emplace_back([&] { optimizer.update(test_coefficients(), state.arrays()); });
  for (std::thread& caller : callers) caller.join();
  for (const OptimizerData& state : states) EXPECT_EQ(state.difference(expected), "");
}

TEST_F(CpuOptimizerTest, OneMasterInOneChunkIsNoticed) {
  CpuOptimizer optimizer(2);
  OptimizerData data({.element_count = kLarge});
  EXPECT_EQ(optimizer.update(test_coefficients(), data.arrays()), NewState::kFinite);
  data.set_master(3 * 32768 + 5, HUGE_VALF);
  EXPECT_EQ(optimizer.update(test_coefficients(), data.arrays()), NewState::kNonFinite);
  EXPECT_EQ(find_non_finite_state(data.arrays()).element, 3 * 32768 + 5);
}

// A description of two nodes that hwloc takes for this machine: the arena's own thread works on the
// second one, and the calling thread stays where it was.
[[noreturn]] void run_on_two_nodes() {
  setenv("HWLOC_SYNTHETIC", "node:2 core:1 pu:1", 1);
  setenv("HWLOC_THISSYSTEM", "1", 1);
  const auto processors = [] {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    if (sched_getaffinity(0, sizeof mask, &mask) != 0) std::_Exit(10);
    return mask;
  };
  const cpu_set_t all = processors();
  if (!CPU_ISSET(0, &all) || !CPU_ISSET(1, &all)) std::_Exit(77);
  AlignedBuffer buffer(5 * kHugePageBytes + 1, "touched by both nodes");
  for (std::uint64_t i = 0; i < buffer.size_bytes(); i += kPageBytes) {
    if (buffer.data()[i] != std::byte{0}) std::_Exit(11);
  }
  WorkerArena arena(2);
  std::atomic<int> arrived = 0;
  std::atomic<int> wrong = 0;
  arena.for_each(2, [&](std::uint64_t, unsigned worker) {
    for (++arrived; arrived < 2;) std::this_thread::yield();  // one iteration for each thread
    const cpu_set_t mask = processors();
    if (worker == 0) wrong += CPU_COUNT(&mask) < 2;
    if (worker == 1) wrong += CPU_COUNT(&mask) != 1 || !CPU_ISSET(1, &mask);
  });
  std::_Exit(wrong);
}

TEST(WorkerArenaDeathTest, ThreadsGoToTheirNodes) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      run_on_two_nodes(),
      [](int status) {
        return WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77);
      },
      "");
}

TEST_F(CpuOptimizerTest, RefusesZeroThreads) {
  try {
    CpuOptimizer optimizer(0);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace sluice
