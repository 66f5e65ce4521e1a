// Reading the state, several blocks at once and ahead of the calls: exact bits, each block read
// once.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>

#include <sluice/checkpoint.h>
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "tests/engine/store/state_access_cases.h"
#include "tests/support/expect_error.h"
#include "tests/support/flip_bit.h"

namespace sluice::test {
namespace {

class StateReadsTest : public StateAccessTest {
 protected:
  // Fails if the reads do not come although no call waits for them.
  void await_reads(std::size_t count) {
    for (int i = 0; i < 20000 && reads_.count() < count; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_GE(reads_.count(), count);
  }
};

TEST_F(StateReadsTest, AnyRangeWithAnyNumberOfLanesHasItsValues) {
  std::mt19937_64 random(11);
  for (const std::uint32_t lanes : {1, 2, 3, 7}) {
    Engine& engine = make(lanes);
    Formula formula;
    engine.restore(formula);
    const auto draw = [&](std::uint64_t end) {
      return std::uniform_int_distribution<std::uint64_t>(0, end)(random);
    };
    for (int i = 0; i < 60; ++i) {
      const TensorPlace& tensor = engine.tensors()[draw(engine.tensors().size() - 1)];
      const StateKind kind =
          std::array{StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}[draw(2)];
      std::uint64_t first = draw(tensor.element_count);
      // A few pieces, each where the one before ended.
      for (int piece = 0; piece < 3; ++piece) {
        const std::uint64_t count = draw(tensor.element_count - first);
        expect_values(tensor, kind, first, count);
        first += count;
      }
    }
    engine_.reset();
  }
}

TEST_F(StateReadsTest, PiecesInOrderReadEachBlockOnce) {
  Engine& engine = make(4);
  Formula formula;
  engine.restore(formula);
  const TensorPlace& tensor = engine.tensors()[1];
  reads_.clear();
  // The tensor begins in the first block. From the second piece on, the blocks that follow are read
  // before a call wants them.
  constexpr std::uint64_t kPiece = 700;
  for (std::uint64_t first = 0; first < tensor.element_count; first += kPiece) {
    const std::uint64_t count = std::min(kPiece, tensor.element_count - first);
    expect_values(tensor, StateKind::kExpAvg, first, count);
    if (first == 0) {
      EXPECT_EQ(reads_.count(), 2u);  // two planes
    } else if (first == kPiece) {
      await_reads(2u * 4);  // a block in each place
    }
  }
  EXPECT_EQ(reads_.count(), 2u * 13);
  reads_.clear();
  expect_values(tensor, StateKind::kMaster, 0, tensor.element_count);
  EXPECT_LE(reads_.count(), 2u * 13);
  EXPECT_GE(reads_.count(), 2u * 9);  // at most four blocks are still there
}

// A block that is read ahead has been asked for by no call. Its failure is that of the call that
// asks for it, and is over when the block is whole again.
TEST_F(StateReadsTest, ADamagedBlockThatIsReadAheadFailsTheCallThatWantsIt) {
  Engine& engine = make(4);
  Formula formula;
  engine.restore(formula);
  const TensorPlace& tensor = engine.tensors()[1];
  const std::uint64_t first_of_next = kBlockElements - tensor.offset_elements;
  const std::uint64_t first_of_damaged = first_of_next + 2 * kBlockElements;
  reads_.clear();
  expect_values(tensor, StateKind::kExpAvg, first_of_damaged, 1);
  const std::vector<Reads::Place> places = reads_.all();
  ASSERT_EQ(places.size(), 2u);    // its two planes
  (void)engine.begin_inference();  // what has been read is forgotten
  for (const Reads::Place& place : places) flip_bit(place.descriptor, place.offset_bytes);

  expect_values(tensor, StateKind::kExpAvg, 0, 700);
  reads_.clear();
  expect_values(tensor, StateKind::kExpAvg, 700, first_of_next + 1 - 700);
  // It is read ahead beside the blocks before and after it.
  await_reads(2u * 4);
  EXPECT_TRUE(std::ranges::any_of(reads_.all(), [&](const Reads::Place& read) {
    return read.descriptor == places[0].descriptor && read.offset_bytes == places[0].offset_bytes;
  })) << "the damaged block has not been read ahead";
  expect_values(tensor, StateKind::kExpAvg, first_of_next + 1, 2 * kBlockElements - 1);
  float value = 0;
  const std::string message = expect_error(ErrorCode::kDamaged, [&] {
    engine.read_state(tensor.id, StateKind::kExpAvg, first_of_damaged,
                      std::as_writable_bytes(std::span(&value, 1)));
  });
  EXPECT_NE(message.find("\"a\" block 3"), std::string::npos) << message;

  for (const Reads::Place& place : places) flip_bit(place.descriptor, place.offset_bytes);
  expect_values(tensor, StateKind::kExpAvg, first_of_damaged, kBlockElements);
}

TEST_F(StateReadsTest, WholeTensorsInOrderReadEachBlockOnceAndAhead) {
  Engine& engine = make(4);
  Formula formula;
  engine.restore(formula);
  reads_.clear();
  for (const TensorPlace& tensor : engine.tensors()) {
    expect_values(tensor, StateKind::kMaster, 0, tensor.element_count);
    // Tensor 2 ends with the first unit: those of the next one are under way.
    if (index_of(tensor.id) == 2)
      await_reads(2 * (layout_of(engine).blocks_of(tensor.unit).size() + 3));
  }
  EXPECT_EQ(reads_.count(), 2 * layout_of(engine).blocks().size());
}

// A call that follows no other one tells nothing about the next.
TEST_F(StateReadsTest, OneCallReadsNoOtherBlocks) {
  Engine& engine = make(4);
  Formula formula;
  engine.restore(formula);
  reads_.clear();
  expect_values(engine.tensors()[1], StateKind::kMaster, 5 * kBlockElements, kBlockElements);
  expect_values(engine.tensors()[1], StateKind::kExpAvg, 0, 10);
  expect_values(engine.tensors()[3], StateKind::kExpAvg, 0, 10);
  EXPECT_EQ(reads_.count(), 2u * (2 + 1 + 1));
}

// Steps and inferences use the lanes and the parameter slots.
TEST_F(StateReadsTest, AnInferenceWaitsForReadsAhead) {
  Engine& engine = make(4);
  Formula formula;
  engine.restore(formula);
  expect_values(engine.tensors()[1], StateKind::kExpAvg, 0, 10);
  {
    const std::scoped_lock lock(reads_.mutex);
    reads_.holds = true;
  }
  expect_values(engine.tensors()[1], StateKind::kExpAvg, 10, 10);  // its block is there
  std::atomic<bool> is_released = false;
  std::jthread releasing([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    is_released = true;
    queue_->release();
  });
  {
    const Inference inference = engine.begin_inference();
    EXPECT_TRUE(is_released) << "its end waits for its own reads";
  }
  releasing.join();
  expect_values(engine.tensors()[1], StateKind::kExpAvg, 0, engine.tensors()[1].element_count);
}

// The lanes of an abandoned step may still read ahead. Their memory is what a read of the state
// uses.
TEST_F(StateReadsTest, AReadWaitsForLanesOfAnAbandonedStep) {
  Engine& engine = make(2);
  Formula formula;
  engine.restore(formula);
  const auto set_holds = [this](bool holds) {
    const std::scoped_lock lock(reads_.mutex);
    reads_.held_bytes_min = kBlockElements * 4;  // reads of optimizer state, and not of parameters
    reads_.holds = holds;
  };
  const auto held_count = [this] {
    const std::scoped_lock lock(reads_.mutex);
    return reads_.held.size();
  };
  set_holds(true);
  {
    const Step step = engine.begin_step({.learning_rate = 1e-2});
    while (held_count() < 2) std::this_thread::yield();
  }
  set_holds(false);  // but what is held stays so
  std::jthread releasing([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    queue_->release();
  });
  expect_values(engine.tensors()[3], StateKind::kMaster, 0, 100);
  EXPECT_EQ(held_count(), 0U);
  releasing.join();
  queue_->wait_idle();
  expect_values(engine.tensors()[3], StateKind::kMaster, 0, 100);  // from the lane's memory
  engine.drain();                                                  // nothing has failed
}

// Inference uses the parameter slots, so what lay there is gone.
TEST_F(StateReadsTest, AnInferenceInBetweenChangesNothing) {
  Engine& engine = make(2);
  Formula formula;
  engine.restore(formula);
  const Stream stream(*device_, "compute");
  for (const StateKind kind : {StateKind::kMaster, StateKind::kExpAvg}) {
    expect_values(engine.tensors()[3], kind, 0, 100);
    {
      Inference inference = engine.begin_inference();
      for (std::uint32_t unit = 0; unit < 2; ++unit) (void)inference.acquire(UnitId{unit}, stream);
    }
    expect_values(engine.tensors()[3], StateKind::kMaster, 0, 100);
  }
}

}  // namespace
}  // namespace sluice::test
