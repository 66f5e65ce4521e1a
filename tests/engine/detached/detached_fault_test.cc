// Drives that fail, lie, hang or are slow under the detached optimizer: the right bits or a typed
// error.
#include <cerrno>
#include <utility>

#include <sluice/error.h>
#include "engine/detached/detached_over_queue.h"
#include "tests/engine/detached/detached_support.h"
#include "tests/support/expect_error.h"
#include "tests/support/fault_queue.h"

namespace sluice::test {
namespace {

TEST_F(DetachedTest, AFaultOfADriveIsAnErrorOrNothingAtAll) {
  const OptimizerKind kind = OptimizerKind::kAdamW;
  const std::pair<Fault, ErrorCode> faults[] = {{Fault::kErrno, ErrorCode::kIo},
                                                {Fault::kBitFlip, ErrorCode::kDamaged},
                                                {Fault::kLostWrite, ErrorCode::kDamaged},
                                                {Fault::kMisdirected, ErrorCode::kDamaged}};
  for (const auto& [fault, code] : faults) {
    for (const std::uint64_t at : {0u, 5u, 40u, 70u}) {
      SCOPED_TRACE(fmt::format("fault {} at {}", static_cast<int>(fault), at));
      make_tensors(DType::kBf16, {40'000, 65'536});
      FaultQueue* queue = nullptr;
      DetachedOptimizer optimizer = DetachedOverQueue::make(
          config(kind, TierChoice::kNvme), description(), [&](std::unique_ptr<IoQueue> inner) {
            auto made = make_fault_queue(
                std::move(inner),
                {.seed = 3, .fault = fault, .at = at, .error = EIO, .sticky = true});
            queue = made.get();
            return made;
          });
      const std::string message = expect_error(code, [&] {
        for (int step = 0; step < 8; ++step) {
          const std::vector<DetachedUpdate> updates{next(kind, 0), next(kind, 1)};
          optimizer.begin(updates);
          optimizer.wait_all();
        }
      });
      EXPECT_GT(queue->struck(), 0u);
      EXPECT_NE(message.find("of the state of \"t"), std::string::npos) << message;
      EXPECT_NE(message.find(directory_.path()), std::string::npos) << message;
      std::vector<float> values(8);
      expect_error(code, [&] { optimizer.begin({}); });
      expect_error(code, [&] { optimizer.wait(0); });
      expect_error(code, [&] { optimizer.wait_parameters(); });
      expect_error(code, [&] { optimizer.wait_all(); });
      expect_error(code, [&] { optimizer.read(1, StateKind::kExpAvg, 0, values); });
      expect_error(code, [&] { optimizer.write(1, StateKind::kExpAvg, 0, values); });
    }
  }
}

TEST_F(DetachedTest, AReadThatTheDriveRefusesIsAnError) {
  make_tensors(DType::kFp32, {40'000});
  DetachedOptimizer optimizer = DetachedOverQueue::make(
      config(OptimizerKind::kAdamW, TierChoice::kNvme), description(),
      [](std::unique_ptr<IoQueue> inner) {
        return make_fault_queue(std::move(inner), {.at = 10, .error = EIO, .sticky = true});
      });
  const DetachedUpdate update = next(OptimizerKind::kAdamW, 0);  // ten blocks, none to be read yet
  optimizer.begin({&update, 1});
  optimizer.wait_all();
  std::vector<float> values(40'000);
  const std::string message =
      expect_error(ErrorCode::kIo, [&] { optimizer.read(0, StateKind::kExpAvg, 0, values); });
  EXPECT_NE(message.find("read of the state of \"t0\""), std::string::npos) << message;
}

// The second read brings the right bytes, and the user hears of it, once.
// The first step writes ten records, and reads none.
TEST_F(DetachedTest, AReadThatIsRepeatedIsANote) {
  const OptimizerKind kind = OptimizerKind::kAdamW;
  make_tensors(DType::kFp32, {40'000});
  DetachedOptimizer optimizer = DetachedOverQueue::make(
      config(kind, TierChoice::kNvme), description(), [](std::unique_ptr<IoQueue> inner) {
        return make_fault_queue(std::move(inner), {.at = 10, .error = EIO});
      });
  (void)optimizer.take_notes();
  for (int step = 0; step < 2; ++step) {
    const DetachedUpdate update = next(kind, 0);
    optimizer.begin({&update, 1});
    optimizer.wait_all();
  }
  const std::vector<std::string> notes = optimizer.take_notes();
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("a record is read again, because"), std::string::npos) << notes[0];
  EXPECT_NE(notes[0].find("Input/output error"), std::string::npos) << notes[0];
  EXPECT_TRUE(optimizer.take_notes().empty());
  expect_equal(optimizer, kind);
}

TEST_F(DetachedTest, ADriveThatDelaysAndReordersChangesNothing) {
  const OptimizerKind kind = OptimizerKind::kAdamW;
  make_tensors(DType::kBf16, counts_);
  DetachedOptimizer optimizer = DetachedOverQueue::make(
      config(kind, TierChoice::kNvme), description(), [&](std::unique_ptr<IoQueue> inner) {
        return make_fault_queue(std::move(inner), {.seed = 9, .delay_us_max = 500});
      });
  train(optimizer, kind);
  expect_equal(optimizer, kind);
}

TEST_F(DetachedTest, ADriveThatDoesNotAnswerIsATimeout) {
  make_tensors(DType::kFp32, {40'000});
  Config made = config(OptimizerKind::kAdamW, TierChoice::kNvme);
  made.storage.timeout_s = 2;
  DetachedOptimizer optimizer =
      DetachedOverQueue::make(made, description(), [&](std::unique_ptr<IoQueue> inner) {
        return make_fault_queue(std::move(inner), {.fault = Fault::kHang, .at = 2});
      });
  const DetachedUpdate update = next(OptimizerKind::kAdamW, 0);
  optimizer.begin({&update, 1});
  const std::string message = expect_error(ErrorCode::kTimeout, [&] { optimizer.wait_all(); });
  EXPECT_NE(message.find("write of the state of \"t0\""), std::string::npos) << message;
}

TEST_F(DetachedTest, EndsWhileUpdatesAreUnderWay) {
  for (int round = 0; round < 5; ++round) {
    make_tensors(DType::kFp32, {40'000, 65'536});
    DetachedOptimizer optimizer(config(OptimizerKind::kAdamW, TierChoice::kNvme), description());
    for (const std::uint32_t id : {0u, 1u}) {
      const DetachedUpdate update = next(OptimizerKind::kAdamW, id);
      optimizer.begin({&update, 1});
    }
    if (round % 2 != 0) optimizer.wait(0);
  }
}

}  // namespace
}  // namespace sluice::test
