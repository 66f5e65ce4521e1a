// The queues behind storage.backend: what "auto" picks where the kernel refuses io_uring, and that
// no bit depends on it.
#include <gtest/gtest.h>

#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "engine/store/storage_queue.h"
#include "tests/support/expect_error.h"
#include "tests/support/refused_syscall.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

Config nvme_config(const std::string& path, IoBackend backend) {
  Config config = toy_config(path);
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.host_bytes = 1_MiB;
  config.storage.backend = backend;
  return config;
}

// Runs two steps and returns the engine's notes; the state must be the oracle's.
std::vector<std::string> notes_of_exact_run(const Config& config) {
  const ToyOptions options{.steps = 2};
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  const ModelSpec model = toy_model();
  Engine engine(config, model, *device);
  EXPECT_TRUE(
      same_training(run_toy(engine, model, *device, config, options), toy_oracle(config, options)));
  return engine.notes();
}

TEST(StorageBackend, ThreadsAndSyncGiveTheSameBitsWithoutANote) {
  const TempDirectory directory;
  for (const IoBackend backend : {IoBackend::kThreads, IoBackend::kSync})
    EXPECT_TRUE(notes_of_exact_run(nvme_config(directory.path(), backend)).empty());
}

TEST(StorageBackend, AutoFallsBackToThreadsAndSaysWhyInOneLine) {
  const TempDirectory directory;
  // Refused at once, or behind io_uring_setup.
  for (const long call : {SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register}) {
    for (const int error : {EPERM, ENOSYS}) {
      std::vector<std::string> notes;
      const bool filtered = run_with_refused({.number = call, .error = error}, [&] {
        notes = notes_of_exact_run(nvme_config(directory.path(), IoBackend::kAuto));
      });
      if (!filtered) GTEST_SKIP() << "seccomp filters are not allowed here";
      ASSERT_EQ(notes.size(), 1u) << call;
      EXPECT_NE(notes[0].find("uses threads instead of io_uring"), std::string::npos) << notes[0];
      EXPECT_NE(notes[0].find(errno_text(error)), std::string::npos) << notes[0];
      EXPECT_EQ(notes[0].find('\n'), std::string::npos) << notes[0];
    }
  }
}

TEST(StorageBackend, UringByNameIsRefusedWhereItIsNotAllowed) {
  const TempDirectory directory;
  std::string message;
  const bool filtered = run_with_refused({.number = SYS_io_uring_setup, .error = EPERM}, [&] {
    message = expect_error(ErrorCode::kUnsupported, [&] {
      (void)notes_of_exact_run(nvme_config(directory.path(), IoBackend::kUring));
    });
  });
  if (!filtered) GTEST_SKIP() << "seccomp filters are not allowed here";
  EXPECT_NE(message.find("\"threads\""), std::string::npos) << message;
}

// The message names the thread and the limits, not the machine's innards.
TEST(StorageBackend, AThreadThatCannotBeStartedIsNamed) {
  const TempDirectory directory;
  for (const IoBackend backend : {IoBackend::kAuto, IoBackend::kThreads, IoBackend::kSync}) {
    std::string message;
    const bool filtered = run_with_refused({.number = SYS_clone3, .error = EAGAIN}, [&] {
      message = expect_error(ErrorCode::kUnsupported, [&] {
        (void)notes_of_exact_run(nvme_config(directory.path(), backend));
      });
    });
    if (!filtered) GTEST_SKIP() << "seccomp filters are not allowed here";
    EXPECT_NE(message.find("cannot start the thread \""), std::string::npos) << message;
    EXPECT_NE(message.find("ulimit -u"), std::string::npos) << message;
    EXPECT_NE(message.find("pids.max"), std::string::npos) << message;
  }
}

// The scheduler submits and must go on: there is room for all that the engine can have in flight.
TEST(StorageBackend, SubmitDoesNotWaitForADriveThatIsSlow) {
  for (const IoBackend backend : {IoBackend::kAuto, IoBackend::kThreads}) {
    constexpr std::size_t kTransfers = 60;
    static std::atomic<bool> may_end;
    may_end = false;
    Config::Storage storage;
    storage.backend = backend;
    storage.queue_depth = 1;
    std::string note;
    const auto queue = open_io_queue(storage, {.transfers_max = kTransfers}, note);
    std::vector<IoRequest> requests(kTransfers);  // without a file: they fail at once
    for (IoRequest& request : requests) {
      request.on_complete = [](IoRequest&) { may_end.wait(false); };
      IoRequest* const pointer = &request;
      queue->submit({&pointer, 1});  // would hang without the room
    }
    may_end = true;
    may_end.notify_all();
    queue->wait_idle();
    EXPECT_EQ(queue->counters().failed, kTransfers);
  }
}

// Writes down what it passes on.
class Listening final : public IoQueue {
 public:
  Listening(std::unique_ptr<IoQueue> inner, std::vector<IoRequest>& heard)
      : inner_(std::move(inner)), heard_(heard) {}
  void submit(std::span<IoRequest* const> requests) override {
    for (const IoRequest* request : requests) {
      const std::scoped_lock lock(mutex_);
      heard_.push_back(*request);
    }
    inner_->submit(requests);
  }
  void wait_idle() override { inner_->wait_idle(); }
  IoCounters counters() const override { return inner_->counters(); }
  std::string_view name() const override { return inner_->name(); }

 private:
  std::unique_ptr<IoQueue> inner_;
  std::vector<IoRequest>& heard_;
  std::mutex mutex_;
};

// Parameters that computation waits for, before what the pass reads, before what it writes.
TEST(StoragePriority, EveryRequestSaysHowUrgentItIs) {
  const TempDirectory directory;
  const Config config = nvme_config(directory.path(), IoBackend::kAuto);
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  const ModelSpec model = toy_model();
  std::vector<IoRequest> heard;
  Engine engine =
      EngineOverQueue::make(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
        return std::make_unique<Listening>(std::move(queue), heard);
      });
  engine.initialize(toy_values());
  heard.clear();
  const Stream stream(*device, "compute");
  Step step = engine.begin_step({.learning_rate = 1e-2});
  walk_step(step, model, engine, *device, stream, config, 1);
  (void)step.finish();
  engine.drain();
  std::map<IoPriority, std::uint64_t> counts;
  for (const IoRequest& request : heard) {
    ++counts[request.priority];
    EXPECT_EQ(request.kind == IoKind::kWrite, request.priority == IoPriority::kLow);
    // Records are five times as long as their parameters.
    const bool is_record = request.length_bytes > 4096 * sizeof(std::uint16_t);
    EXPECT_FALSE(is_record && request.priority == IoPriority::kHigh);
  }
  const std::size_t blocks = layout_of(engine).blocks().size();
  EXPECT_GE(counts[IoPriority::kHigh], blocks);    // forward, at least
  EXPECT_GE(counts[IoPriority::kNormal], blocks);  // the pass: records at least
  EXPECT_EQ(counts[IoPriority::kLow], 2 * blocks);
}

}  // namespace
}  // namespace sluice::test
