// The C interface in its process: at the end of the process, and with its signals.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/capi/capi_support.h"

namespace sluice::test {
namespace {

const char* config_text(const char* config) {
  const char* text = nullptr;
  return sluice_read_config(config, "config", &text) == SLUICE_OK ? text : sluice_last_error();
}

// Texts of several lengths, so that memory which a destroyed text still held is found.
void use_texts_at_exit() {
  const std::string long_key(300, 'k');
  for (const char* const key : {"memroy", long_key.c_str(), "x"}) {
    (void)sluice_drain(nullptr);
    if (std::string(sluice_last_error()) != "sluice_drain: the engine is null") std::_Exit(3);
    if (std::string(config_text("{}")) != "{}") std::_Exit(4);
    const std::string wrong = std::string("{\"") + key + "\": 1}";
    if (std::string(config_text(wrong.c_str())).find(key) == std::string::npos) std::_Exit(5);
  }
}

// glibc has destroyed the main thread's variables before that.
TEST(CApiProcess, CallsAtExitHaveTheirTexts) {
  EXPECT_EXIT(
      {
        use_texts_at_exit();
        (void)std::atexit(use_texts_at_exit);
        std::exit(0);
      },
      testing::ExitedWithCode(0), "");
}

// An engine whose updates are large enough for threads of oneTBB.
class CApiSignals : public CApi {
 protected:
  void train_a_large_step() {
    sluice_model made = model();
    made.units = &large_unit_;
    made.unit_count = 1;
    const std::string config = R"({"precision": {"parameters": "fp32"}, "run": {"threads": 4},
        "memory": {"device": "64MiB", "host": "64MiB"}, "storage": {"paths": [")" +
                               directory_.path() + R"("]},
        "placement": {"parameters": "nvme", "optimizer": "nvme"}})";
    ASSERT_EQ(sluice_engine_create(config.c_str(), &made, &engine_), SLUICE_OK)
        << sluice_last_error();
    ASSERT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_OK) << sluice_last_error();
    ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK) << sluice_last_error();
    use(0, SLUICE_FORWARD, 1);
    use(0, SLUICE_BACKWARD, 1);
    sluice_step_report report{};
    ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
    ASSERT_EQ(sluice_drain(engine_), SLUICE_OK) << sluice_last_error();
  }

 private:
  const std::uint64_t large_[1] = {3'000'000};
  const sluice_tensor large_tensor_{"weight", large_, 1, 1};
  const sluice_unit large_unit_{"large", &large_tensor_, 1, 0};
};

// The signals that another thread of this process blocks, by the kernel's numbers.
std::uint64_t blocked_by(const std::filesystem::path& task) {
  std::ifstream status(task / "status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("SigBlk:")) return std::stoull(line.substr(7), nullptr, 16);
  return UINT64_MAX;  // it has ended
}

TEST_F(CApiSignals, NoThreadOfTheEngineTakesAnyMeantForTheProcess) {
  train_a_large_step();
  std::size_t others = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(::gettid())) continue;
    ++others;
    const std::uint64_t blocked = blocked_by(task.path());
    for (const int number : {SIGHUP, SIGINT, SIGUSR1, SIGALRM, SIGTERM})
      EXPECT_TRUE((blocked >> (number - 1)) & 1) << ::strsignal(number) << ": " << task.path();
  }
  EXPECT_GE(others, 3u);  // at least scheduler, worker and queue
}

// The program blocks it behind the engine's back.
TEST_F(CApiSignals, AProgramMayWaitForASignal) {
  const auto wait_for_one = [this] {
    train_a_large_step();
    sigset_t signals;
    ::sigemptyset(&signals);
    ::sigaddset(&signals, SIGTERM);
    (void)::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    (void)::kill(::getpid(), SIGTERM);
    const timespec limit{.tv_sec = 10, .tv_nsec = 0};
    std::_Exit(::sigtimedwait(&signals, nullptr, &limit) == SIGTERM ? 0 : 1);
  };
  EXPECT_EXIT(wait_for_one(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace sluice::test
