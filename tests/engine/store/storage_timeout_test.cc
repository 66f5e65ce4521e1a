// A drive that answers late, or never.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/engine_over_queue.h"
#include "engine/store/block_store.h"
#include "engine/store/transfer_watch.h"
#include "io/throttled_queue.h"
#include "io/transfer_progress.h"
#include "tests/support/fault_queue.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

Config hanging_config(const std::string& path, double timeout_s) {
  Config config = toy_config(path);
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.host_bytes = 1_MiB;
  config.storage.timeout_s = timeout_s;
  return config;
}

// At every phase of a run: initialization, forward and backward, the pass, reading back. The engine
// comes apart afterwards, once the drive has let go.
TEST(StorageTimeout, ARequestThatNeverEndsStopsTheRunWithTheListOfThoseInFlight) {
  const TempDirectory directory;
  const Config config = hanging_config(directory.path(), 0.25);
  const ModelSpec model = toy_model();
  std::uint64_t all = 0;
  {
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    const IoQueue* seen = nullptr;
    Engine engine =
        EngineOverQueue::make(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
          seen = queue.get();
          return queue;
        });
    (void)run_toy(engine, model, *device, config, {.steps = 1});
    all = seen->counters().read_requests + seen->counters().write_requests;
  }
  for (const std::uint64_t at : {all / 100, all / 4, all / 3, all / 2, all * 3 / 4, all * 9 / 10}) {
    for (const bool sticky : {false, true}) {
      SCOPED_TRACE(at);
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      Engine engine =
          EngineOverQueue::make(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
            return make_fault_queue(std::move(queue),
                                    {.fault = Fault::kHang, .at = at, .sticky = sticky});
          });
      try {
        (void)run_toy(engine, model, *device, config, {.steps = 1});
        FAIL() << "request " << at << " hangs";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kTimeout) << error.what();
        const std::string message = error.what();
        EXPECT_NE(message.find("storage.timeout"), std::string::npos) << message;
        EXPECT_NE(message.find("in flight:\n  "), std::string::npos) << message;
        EXPECT_NE(message.find("of unit \""), std::string::npos) << message;
        EXPECT_NE(message.find(directory.path()), std::string::npos) << message;
      }
      EXPECT_THROW((void)engine.begin_step({.learning_rate = 1}), Error);
    }
  }
}

TEST(StorageTimeout, NotesAreNoMoreThanSixtyFour) {
  constexpr std::uint32_t kCount = 70;
  TransferWatch watch(
      1, {.describe = [](const Transfer&) { return "one"; }, .on_stuck = [](const Error&) {}});
  for (std::uint32_t i = 0; i < kCount; ++i) watch.note("said");
  EXPECT_EQ(watch.take_notes().size(), 64u);
  std::vector<Transfer> transfers(kCount);
  for (std::uint32_t i = 0; i < kCount; ++i) {  // of a drive each, which all become slow at once
    transfers[i].request.drive = i;
    watch.add(transfers[i], transfers[i].request);
    note_start(transfers[i].request, 1);
  }
  std::vector<std::string> notes;
  while (!watch.is_stuck() && notes.empty()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    notes = watch.take_notes();
  }
  EXPECT_EQ(notes.size(), 64u);
  for (const Transfer& transfer : transfers) watch.remove(transfer);
}

// Ages by themselves, in ticks.
class Ages : public testing::Test {
 protected:
  struct Flight {
    explicit Flight(std::uint32_t drive = 0) { transfer.request.drive = drive; }
    void start() { note_start(transfer.request, 1); }
    Transfer transfer;
  };
  void add(const Flight& flight) { ages_.add(flight.transfer, flight.transfer.request); }
  void remove(const Flight& flight) { ages_.remove(flight.transfer); }
  // The tick at which something is stuck, of at most `count`; 0 if none is. Before each tick, one
  // transfer of `busy_drive` comes and ends.
  std::uint32_t stuck_at(std::uint32_t count, std::optional<std::uint32_t> busy_drive = {}) {
    for (std::uint32_t tick = 1; tick <= count; ++tick) {
      if (busy_drive) {
        const Flight quick(*busy_drive);
        add(quick);
        remove(quick);
      }
      if (ages_.tick([this](const Transfer& slow) { slow_.push_back(&slow); })) return tick;
    }
    return 0;
  }

  static constexpr std::uint32_t kTimeout = TransferAges::kTicksOfTimeout;
  TransferAges ages_;
  std::vector<const Transfer*> slow_;
};

TEST_F(Ages, ADriveThatIsSilentIsStuckAfterTheTimeout) {
  Flight flight;
  add(flight);
  flight.start();
  EXPECT_EQ(stuck_at(1000), kTimeout + 1);
  EXPECT_EQ(slow_, std::vector<const Transfer*>{&flight.transfer});
}

TEST_F(Ages, OneThatWaitsBehindOthersIsAsOldAsTheSilence) {
  const Flight waiting;
  add(waiting);
  EXPECT_EQ(stuck_at(kTimeout), 0u);
  EXPECT_EQ(stuck_at(3 * kTimeout, 0), 0u);  // the drive moves
  EXPECT_EQ(stuck_at(1000), kTimeout + 1);   // and does no more
}

// A long queue in front of a drive that moves all the time, whatever its length.
TEST_F(Ages, ALongQueueIsNotStuck) {
  std::vector<Flight> queue(64);
  for (const Flight& flight : queue) add(flight);
  EXPECT_EQ(stuck_at(100 * kTimeout, 0), 0u);
  EXPECT_TRUE(slow_.empty());
}

TEST_F(Ages, ALostTransferBesideABusyDriveIsStuckInTheEnd) {
  Flight lost;
  add(lost);
  EXPECT_EQ(stuck_at(5 * kTimeout, 0), 0u);  // has waited for its turn
  lost.start();
  EXPECT_EQ(stuck_at(1000, 0), TransferAges::kBusyFactor * kTimeout + 1);
}

TEST_F(Ages, AnotherDriveSaysNothing) {
  Flight flight(1);
  add(flight);
  flight.start();
  EXPECT_EQ(stuck_at(1000, 0), kTimeout + 1);
}

TEST_F(Ages, TimeBeforeTheKernelDoesNotCount) {
  Flight flight;
  add(flight);
  EXPECT_EQ(stuck_at(kTimeout), 0u);
  flight.start();
  EXPECT_EQ(stuck_at(1000), kTimeout + 1);
}

// A slow drive whose queue is several times as long as the timeout.
TEST(StorageTimeout, ADriveThatMovesIsNotBlamedForTheLengthOfItsQueue) {
  const TempDirectory directory;
  Config config = hanging_config(directory.path(), 0.3);
  config.memory.host_bytes = 64_MiB;
  config.optimizer.lanes = 64;
  config.optimizer.overlap = OverlapPolicy::kDeferred;
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  const ModelSpec model = toy_model();
  Engine engine = EngineOverQueue::make(config, model, *device, [](std::unique_ptr<IoQueue> queue) {
    return make_throttled_queue(std::move(queue), {.read_bytes_per_second = 2'500'000,
                                                   .write_bytes_per_second = 8'000'000,
                                                   .duplex = Duplex::kHalf});
  });
  EXPECT_TRUE(run_toy(engine, model, *device, config, {.steps = 1}).state ==
              toy_oracle(config, {.steps = 1}).state);
}

// The watch by itself: slow is noted once, late is stuck once, and what has ended is neither.
TEST(TransferWatch, NotesASlowTransferOnceAndStopsAtALateOne) {
  std::atomic<int> stuck = 0;
  TransferWatch watch(
      0.4, {.describe = [](const Transfer&) { return std::string("the read"); },
            .on_stuck =
                [&](const Error& error) {
                  const std::string message = error.what();
                  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
                  EXPECT_NE(message.find("1 in flight:\n  the read"), std::string::npos) << message;
                  ++stuck;
                }});
  const Transfer quick;
  watch.add(quick, quick.request);
  watch.remove(quick);
  const Transfer slow;
  watch.add(slow, slow.request);
  std::vector<std::string> notes;
  while (notes.empty()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    notes = watch.take_notes();
  }
  EXPECT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("the read"), std::string::npos) << notes[0];
  while (stuck == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(watch.is_stuck());
  EXPECT_TRUE(watch.take_notes().empty());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(stuck, 1);
}

// A list of more than 32 says how many more there are.
TEST(TransferWatch, ALongListIsCut) {
  std::atomic<bool> is_stuck = false;
  std::string list;
  TransferWatch watch(0.05, {.describe = [](const Transfer&) { return std::string("a read"); },
                             .on_stuck =
                                 [&](const Error& error) {
                                   list = error.what();
                                   is_stuck = true;
                                 }});
  std::vector<Transfer> transfers(40);
  for (Transfer& transfer : transfers) {
    transfer.request.started_ns = 1;  // it is with the kernel
    watch.add(transfer, transfer.request);
  }
  while (!is_stuck) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_NE(list.find("; 40 in flight:\n  a read"), std::string::npos) << list;
  EXPECT_TRUE(list.ends_with("\n  and 8 more")) << list;
  EXPECT_EQ(std::ranges::count(list, '\n'), 33) << list;
}

TEST(TransferWatch, ZeroWatchesNothing) {
  TransferWatch watch(0, {});
  const Transfer transfer;
  watch.add(transfer, transfer.request);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(watch.is_stuck());
  watch.remove(transfer);
}

}  // namespace
}  // namespace sluice::test
