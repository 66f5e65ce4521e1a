#include "engine/transfer_watch.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

namespace sluice {
namespace {

constexpr std::uint32_t kTicksOfTimeout = 16;
constexpr std::uint32_t kTicksOfSlow = kTicksOfTimeout / 4;
constexpr std::size_t kListedMax = 32;
constexpr std::size_t kNotesMax = 64;  // between two calls of take_notes()

}  // namespace

TransferWatch::TransferWatch(double timeout_s, Hooks hooks)
    : timeout_s_(timeout_s), hooks_(std::move(hooks)) {
  if (timeout_s > 0) thread_ = std::thread([this] { run(); });
}

TransferWatch::~TransferWatch() {
  if (!thread_.joinable()) return;
  {
    const std::scoped_lock lock(mutex_);
    is_stopping_ = true;
  }
  stop_wanted_.notify_all();
  thread_.join();
}

void TransferWatch::add(const Transfer& transfer) {
  if (timeout_s_ == 0) return;
  const std::scoped_lock lock(mutex_);
  in_flight_.push_back({.transfer = &transfer});
}

void TransferWatch::remove(const Transfer& transfer) {
  if (timeout_s_ == 0) return;
  const std::scoped_lock lock(mutex_);
  const auto found = std::ranges::find(in_flight_, &transfer, &Watched::transfer);
  if (found == in_flight_.end()) return;
  *found = in_flight_.back();
  in_flight_.pop_back();
}

std::vector<std::string> TransferWatch::take_notes() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(notes_, {});
}

void TransferWatch::run() {
  ::pthread_setname_np(::pthread_self(), "sluice-watch");
  const std::chrono::duration<double> period(timeout_s_ / kTicksOfTimeout);
  std::unique_lock lock(mutex_);
  while (!stop_wanted_.wait_for(lock, period, [this] { return is_stopping_; })) {
    if (!look()) continue;
    const std::string transfers = list();
    is_stuck_.store(true, std::memory_order_release);  // whoever sees it need not wait any more
    lock.unlock();
    hooks_.on_stuck(transfers);
    return;
  }
}

bool TransferWatch::look() {
  bool found_stuck = false;
  for (Watched& watched : in_flight_) {
    ++watched.ticks;
    if (watched.ticks == kTicksOfSlow && notes_.size() < kNotesMax)
      notes_.push_back(fmt::format("storage is slow: {} has been under way for {:.3g} s",
                                   hooks_.describe(*watched.transfer), timeout_s_ / 4));
    found_stuck |= watched.ticks > kTicksOfTimeout;
  }
  return found_stuck;
}

std::string TransferWatch::list() const {
  std::string text = fmt::format("{} in flight:", in_flight_.size());
  for (std::size_t i = 0; i < std::min(in_flight_.size(), kListedMax); ++i) {
    text += fmt::format("\n  {}, for {:.3g} s", hooks_.describe(*in_flight_[i].transfer),
                        in_flight_[i].ticks * timeout_s_ / kTicksOfTimeout);
  }
  if (in_flight_.size() > kListedMax)
    text += fmt::format("\n  and {} more", in_flight_.size() - kListedMax);
  return text;
}

}  // namespace sluice
