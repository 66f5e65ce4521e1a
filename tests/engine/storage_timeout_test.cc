// A drive that answers late, or never.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/units.h"
#include "engine/block_store.h"
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
  for (const std::uint64_t at : {3u, 90u, 130u, 200u, 300u, 380u}) {
    for (const bool sticky : {false, true}) {
      SCOPED_TRACE(at);
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      Engine engine(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
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

// The watch by itself: slow is noted once, late is stuck once, and what has ended is neither.
TEST(TransferWatch, NotesASlowTransferOnceAndStopsAtALateOne) {
  std::atomic<int> stuck = 0;
  TransferWatch watch(
      0.4, {.describe = [](const Transfer&) { return std::string("the read"); },
            .on_stuck =
                [&](const std::string& list) {
                  EXPECT_NE(list.find("1 in flight:\n  the read"), std::string::npos) << list;
                  ++stuck;
                }});
  const Transfer quick;
  watch.add(quick);
  watch.remove(quick);
  const Transfer slow;
  watch.add(slow);
  std::vector<std::string> notes;
  while (notes.empty()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    notes = watch.take_notes();
  }
  EXPECT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("the read"), std::string::npos) << notes[0];
  EXPECT_EQ(stuck, 0);
  while (stuck == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(watch.is_stuck());
  EXPECT_TRUE(watch.take_notes().empty());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(stuck, 1);
}

TEST(TransferWatch, ZeroWatchesNothing) {
  TransferWatch watch(0, {});
  const Transfer transfer;
  watch.add(transfer);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(watch.is_stuck());
  watch.remove(transfer);
}

}  // namespace
}  // namespace sluice::test
