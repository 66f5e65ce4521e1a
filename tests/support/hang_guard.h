// If a test case hangs, the guard prints a line about the case, and ends the program. The limit is
// some minutes. Only a case that hangs takes longer than the limit.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace sluice::test {

class HangGuard {
 public:
  explicit HangGuard(std::string what) : what_(std::move(what)), thread_([this] { watch(); }) {}
  ~HangGuard() {
    {
      const std::scoped_lock lock(mutex_);
      is_over_ = true;
    }
    over_.notify_one();
    thread_.join();
  }
  HangGuard(const HangGuard&) = delete;
  HangGuard& operator=(const HangGuard&) = delete;

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    if (over_.wait_for(lock, std::chrono::minutes(3), [this] { return is_over_; })) return;
    std::fprintf(stderr, "hangs: %s\n", what_.c_str());
    std::abort();
  }

  const std::string what_;
  std::mutex mutex_;
  std::condition_variable over_;
  bool is_over_ = false;
  std::thread thread_;  // the last member, because the thread uses all others
};

}  // namespace sluice::test
