// Calls within a step that most programs do not need: announced units, waits in pieces, traces.
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <fstream>
#include <future>
#include <thread>

#include "tests/capi/capi_support.h"
#include "tests/support/file_text.h"
#include "tests/support/fork_quietly.h"

namespace sluice::test {
namespace {

std::atomic<bool> reads_are_held = false;

struct HeldReads {
  HeldReads() { reads_are_held = true; }
  ~HeldReads() { reads_are_held = false; }
};

}  // namespace
}  // namespace sluice::test

// Stands before libc's function for all libraries of this program.
extern "C" ssize_t pread(int file, void* data, size_t bytes, off_t offset) {
  while (sluice::test::reads_are_held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return ::syscall(SYS_pread64, file, data, bytes, offset);
}

namespace sluice::test {
namespace {

// Plain gradient descent: p -= rate * p.
constexpr const char* kDescent =
    R"("type": "sgd", "momentum": 0, "weight_decay": 0, "clip_norm": 0, "overlap": "serial")";

class CApiAnnounce : public CApi {
 protected:
  void make_experts() {
    sluice_model made = model();
    made.units = experts_;
    made.unit_count = 4;
    ASSERT_EQ(sluice_engine_create(config(kDescent).c_str(), &made, &engine_), SLUICE_OK)
        << sluice_last_error();
    ASSERT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_OK) << sluice_last_error();
  }

  std::vector<std::uint32_t> announce(const std::vector<std::uint32_t>& units, sluice_pass pass) {
    std::vector<std::uint32_t> uses(2);
    std::uint32_t count = 0;
    EXPECT_EQ(sluice_announce(engine_, units.data(), static_cast<std::uint32_t>(units.size()), pass,
                              uses.data(), &count),
              SLUICE_OK)
        << sluice_last_error();
    uses.resize(count);
    return uses;
  }

  // A step that uses `experts` in this order.
  void train_with(const std::vector<std::uint32_t>& experts) {
    ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK) << sluice_last_error();
    use(0, SLUICE_FORWARD, 1);
    EXPECT_EQ(announce(experts, SLUICE_FORWARD), experts);
    for (const std::uint32_t expert : experts) use(expert, SLUICE_FORWARD, 1);
    use(1, SLUICE_FORWARD, 1);
    use(1, SLUICE_BACKWARD, 1);
    const std::vector<std::uint32_t> back(experts.rbegin(), experts.rend());
    EXPECT_EQ(announce(back, SLUICE_BACKWARD), back);
    for (const std::uint32_t expert : back) use(expert, SLUICE_BACKWARD, 1);
    use(0, SLUICE_BACKWARD, 1);
    sluice_step_report report{};
    ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
    EXPECT_EQ(report.schedule_changes, 0u);
  }

  void expect_refused(const char* words, const std::vector<std::uint32_t>& units,
                      std::int32_t pass) {
    std::uint32_t uses[4], count = 0;
    EXPECT_EQ(sluice_announce(engine_, units.data(), static_cast<std::uint32_t>(units.size()), pass,
                              uses, &count),
              SLUICE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(sluice_last_error()).find(words), std::string::npos)
        << sluice_last_error();
  }

  const sluice_tensor third_[1] = {{"expert.0", matrix_, 2, 1}};
  const sluice_tensor fourth_[1] = {{"expert.1", matrix_, 2, 1}};
  const sluice_unit experts_[4] = {units_[0],
                                   units_[1],
                                   {"third", third_, 1, SLUICE_TRAINED | SLUICE_ANNOUNCED},
                                   {"fourth", fourth_, 1, SLUICE_TRAINED | SLUICE_ANNOUNCED}};
};

TEST_F(CApiAnnounce, OnlyAnnouncedExpertsAreTrained) {
  make_experts();
  std::vector<float> expected[2] = {master(3, 5000), master(4, 5000)};
  const std::vector<std::vector<std::uint32_t>> steps{{3, 2}, {3}, {}, {2, 3}};
  for (const std::vector<std::uint32_t>& experts : steps) {
    train_with(experts);
    for (const std::uint32_t expert : experts)
      for (float& value : expected[expert - 2]) value -= 1e-2f * value;
  }
  EXPECT_EQ(master(3, 5000), expected[0]);
  EXPECT_EQ(master(4, 5000), expected[1]);
  ASSERT_EQ(sluice_begin_inference(engine_), SLUICE_OK);
  use(0, SLUICE_INFERENCE, 1);
  EXPECT_EQ(announce({2}, SLUICE_INFERENCE), std::vector<std::uint32_t>{2});
  use(2, SLUICE_INFERENCE, 1);
  ASSERT_EQ(sluice_end_inference(engine_), SLUICE_OK);
}

TEST_F(CApiAnnounce, RefusesWhatItsContractForbids) {
  make_experts();
  expect_refused("neither a step nor an inference", {2}, SLUICE_FORWARD);
  ASSERT_EQ(sluice_begin_inference(engine_), SLUICE_OK);
  expect_refused("whose pass is SLUICE_INFERENCE", {2}, SLUICE_FORWARD);
  ASSERT_EQ(sluice_end_inference(engine_), SLUICE_OK);
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  expect_refused("stands in the model's orders", {1}, SLUICE_FORWARD);
  expect_refused("twice", {2, 2}, SLUICE_FORWARD);
  expect_refused("4", {4}, SLUICE_FORWARD);
  expect_refused("sluice_pass", {2}, 3);
  std::uint32_t uses[4], count = 0;
  const std::uint32_t expert = 2;
  for (const sluice_status status :
       {sluice_announce(engine_, nullptr, 1, SLUICE_FORWARD, uses, &count),
        sluice_announce(engine_, &expert, 1, SLUICE_FORWARD, nullptr, &count),
        sluice_announce(engine_, &expert, 1, SLUICE_FORWARD, uses, nullptr),
        sluice_announce(nullptr, &expert, 1, SLUICE_FORWARD, uses, &count)})
    EXPECT_EQ(status, SLUICE_INVALID_ARGUMENT);
  sluice_lease lease{};
  EXPECT_EQ(sluice_acquire(engine_, 2, SLUICE_FORWARD, &lease), SLUICE_INVALID_ARGUMENT)
      << "it has not been announced";
  ASSERT_EQ(sluice_abandon_step(engine_), SLUICE_OK);
  sluice_model wrong = model();
  const sluice_unit bad[1] = {{"bad", third_, 1, SLUICE_ANNOUNCED | 3}};
  wrong.units = bad;
  wrong.unit_count = 1;
  sluice_engine* none = nullptr;
  EXPECT_EQ(sluice_engine_create(config().c_str(), &wrong, &none), SLUICE_INVALID_ARGUMENT);
}

// A unit whose reads do not return is pending, in pieces as short as they can be, and the same call
// gets it then.
TEST_F(CApiAnnounce, AnAcquireThatPollsWaitsForStorage) {
  backend_ = R"("backend": "threads", )";
  make_experts();
  sluice_lease lease{};
  {
    const HeldReads held;  // before the step begins to read ahead
    ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
    for (std::uint32_t i = 0; i < 20; ++i)
      ASSERT_EQ(sluice_acquire_within(engine_, i % 2, 0, SLUICE_FORWARD, &lease), SLUICE_PENDING)
          << sluice_last_error();
  }
  EXPECT_EQ(lease.parameters, nullptr);
  ASSERT_EQ(sluice_acquire_within(engine_, 600'000, 0, SLUICE_FORWARD, &lease), SLUICE_OK)
      << sluice_last_error();
  EXPECT_EQ(static_cast<const float*>(lease.parameters)[1], std::sin(1.0f));
  ASSERT_EQ(sluice_release(engine_, lease.id), SLUICE_OK);
  ASSERT_EQ(sluice_abandon_step(engine_), SLUICE_OK);
}

TEST_F(CApiAnnounce, AnAcquireThatPollsGetsALease) {
  make_experts();
  for (const std::uint32_t milliseconds : {0u, 60'000u}) {
    ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
    for (const sluice_pass pass : {SLUICE_FORWARD, SLUICE_BACKWARD}) {
      for (const std::uint32_t unit :
           {pass == SLUICE_FORWARD ? 0u : 1u, pass == SLUICE_FORWARD ? 1u : 0u}) {
        sluice_lease lease{};
        sluice_status status = SLUICE_PENDING;
        while (status == SLUICE_PENDING)
          status = sluice_acquire_within(engine_, milliseconds, unit, pass, &lease);
        ASSERT_EQ(status, SLUICE_OK) << sluice_last_error();
        EXPECT_NE(lease.parameters, nullptr);
        ASSERT_EQ(sluice_release(engine_, lease.id), SLUICE_OK);
      }
    }
    sluice_step_report report{};
    ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
    EXPECT_EQ(report.schedule_changes, 0u);
  }
  sluice_lease lease{};
  EXPECT_EQ(sluice_acquire_within(engine_, 1, 0, 3, &lease), SLUICE_INVALID_ARGUMENT);
  EXPECT_TRUE(std::string(sluice_last_error()).starts_with("sluice_acquire_within: pass is 3"))
      << sluice_last_error();
  EXPECT_EQ(sluice_acquire_within(nullptr, 1, 0, SLUICE_FORWARD, &lease), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_acquire_within(engine_, 1, 0, SLUICE_FORWARD, &lease), SLUICE_INVALID_ARGUMENT)
      << "no step is active";
}

// The thread cannot return while reads are held, so the first destroy must neither free nor wait.
TEST_F(CApi, AHandleStaysWhileAThreadIsInACallOfIt) {
  const std::string text = R"({"placement": {"optimizer": "nvme"}, "memory": {"host": "4MiB"},
                               "storage": {"backend": "threads", "block_elements": 4096,
                                           "paths": [")" +
                           directory_.path() + R"("]}})";
  const std::uint64_t elements = 1'000'000;  // whose state is more than the host's memory keeps
  const sluice_optimizer_tensor tensor{"weight", elements, SLUICE_FP32, 0};
  sluice_optimizer* optimizer = nullptr;
  ASSERT_EQ(sluice_optimizer_create(text.c_str(), &tensor, 1, &optimizer), SLUICE_OK)
      << sluice_last_error();
  std::vector<float> weight(elements, 1.0f);
  const std::vector<float> gradient(elements, 0.5f);
  std::future<sluice_status> waiting;
  {
    const HeldReads held;
    for (const std::uint64_t step : {1u, 2u}) {
      const sluice_update made = adam_update(weight.data(), gradient.data(), step);
      ASSERT_EQ(sluice_optimizer_begin(optimizer, &made, 1), SLUICE_OK) << sluice_last_error();
    }
    waiting = std::async(std::launch::async, [&] {
      sluice_status status = SLUICE_OK;
      do {  // refused as long as it meets a call of the loop below
        status = sluice_optimizer_wait_all(optimizer);
      } while (status == SLUICE_INVALID_ARGUMENT);
      return status;
    });
    sluice_optimizer_report report{};
    while (waiting.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready &&
           sluice_optimizer_describe(optimizer, &report) == SLUICE_OK) {
    }
    ASSERT_EQ(waiting.wait_for(std::chrono::seconds(0)), std::future_status::timeout)
        << "the thread is in its call";
    sluice_optimizer_destroy(optimizer);
  }
  EXPECT_EQ(waiting.get(), SLUICE_OK);
  EXPECT_NEAR(weight[0], 1 - 2 * 0.01, 1e-6);
  sluice_optimizer_destroy(optimizer);
}

class CApiTrace : public CApi {
 protected:
  ~CApiTrace() override { (void)sluice_trace_stop(nullptr); }
  const std::string path_ = directory_.path() + "/run.trace";
};

TEST_F(CApiTrace, EnginesAndOptimizersAreInTheFile) {
  ASSERT_EQ(sluice_trace_start(path_.c_str(), 0, 1), SLUICE_OK) << sluice_last_error();
  make();
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  walk();
  sluice_step_report report{};
  ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
  sluice_engine_destroy(engine_);
  engine_ = nullptr;
  sluice_trace_result result{};
  ASSERT_EQ(sluice_trace_stop(&result), SLUICE_OK) << sluice_last_error();
  EXPECT_GT(result.records, 0u);
  EXPECT_EQ(result.lost, 0u);
  const std::string text = file_text(path_);
  EXPECT_EQ(text.size(), result.file_bytes);
  EXPECT_EQ(text.substr(0, 8), "STRACE1\n");
  for (const char* words : {"first.weight", "sluice-trace"})
    EXPECT_NE(text.find(words), std::string::npos) << words;
  result = {};
  ASSERT_EQ(sluice_trace_stop(&result), SLUICE_OK);
  EXPECT_EQ(result.records, 0u);
}

// The file may not grow any more: it says so, and training has not heard of it.
TEST_F(CApiTrace, AFileThatCannotBeWrittenWholeIsSaid) {
  ASSERT_EQ(sluice_trace_start(path_.c_str(), 0, 1), SLUICE_OK) << sluice_last_error();
  make();
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  walk();
  sluice_step_report report{};
  ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
  ASSERT_EQ(sluice_drain(engine_), SLUICE_OK);
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit small = limit;
  small.rlim_cur = 64;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  sluice_engine_destroy(engine_);  // has a last word for the file
  engine_ = nullptr;
  sluice_trace_result result{};
  const sluice_status status = sluice_trace_stop(&result);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  (void)std::signal(SIGXFSZ, before);
  EXPECT_EQ(status, SLUICE_IO);
  const std::string words = sluice_last_error();
  EXPECT_NE(words.find("the trace ends at " + std::to_string(result.file_bytes) + " bytes"),
            std::string::npos)
      << words;
}

// The result of sluice_trace_start() while a limit of this process is `soft`.
sluice_status start_under(int resource, rlim_t soft, const std::string& path) {
  rlimit limit{};
  EXPECT_EQ(getrlimit(static_cast<__rlimit_resource>(resource), &limit), 0);
  const rlimit lower{.rlim_cur = soft, .rlim_max = limit.rlim_max};
  EXPECT_EQ(setrlimit(static_cast<__rlimit_resource>(resource), &lower), 0);
  const sluice_status status = sluice_trace_start(path.c_str(), 0, 1);
  EXPECT_EQ(setrlimit(static_cast<__rlimit_resource>(resource), &limit), 0);
  return status;
}

TEST_F(CApiTrace, NamesTheLimitThatRefusesIt) {
  EXPECT_EQ(start_under(RLIMIT_NOFILE, 0, path_), SLUICE_UNSUPPORTED);
  EXPECT_NE(std::string(sluice_last_error()).find("ulimit -n"), std::string::npos);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  EXPECT_EQ(start_under(RLIMIT_AS, pages * 4096, path_), SLUICE_OUT_OF_MEMORY);
#endif
}

TEST_F(CApiTrace, RefusesWhatItsContractForbids) {
  EXPECT_EQ(sluice_trace_start(nullptr, 0, 1), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_trace_start(path_.c_str(), 2, 2), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_trace_start((path_ + "/none/run.trace").c_str(), 0, 1), SLUICE_INPUT);
  ASSERT_EQ(sluice_trace_start(path_.c_str(), 1, 2), SLUICE_OK) << sluice_last_error();
  EXPECT_EQ(sluice_trace_start(path_.c_str(), 1, 2), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error()).find("running already"), std::string::npos);
  const pid_t child = fork_quietly();
  ASSERT_NE(child, -1);
  if (child == 0) {
    alarm(20);
    _exit(sluice_trace_stop(nullptr) == SLUICE_FORKED &&
                  sluice_trace_start(path_.c_str(), 0, 1) == SLUICE_FORKED
              ? 0
              : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(sluice_trace_stop(nullptr), SLUICE_OK) << sluice_last_error();
}

}  // namespace
}  // namespace sluice::test
