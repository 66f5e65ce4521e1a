#include "engine/store/transfer_watch.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "base/named_thread.h"

namespace sluice {
namespace {

constexpr std::size_t kListedMax = 32;
constexpr std::size_t kWatchNotesMax = 64;  // between two calls of take_notes()

}  // namespace

TransferWatch::TransferWatch(double timeout_s, Hooks hooks)
    : timeout_s_(timeout_s), hooks_(std::move(hooks)) {
  if (timeout_s > 0) thread_ = start_thread("sluice-watch", [this] { run(); });
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

void TransferWatch::add(const Transfer& transfer, const IoRequest& request) {
  if (timeout_s_ == 0) return;
  const std::scoped_lock lock(mutex_);
  in_flight_.add(transfer, request);
}

void TransferWatch::remove(const Transfer& transfer) {
  if (timeout_s_ == 0) return;
  const std::scoped_lock lock(mutex_);
  in_flight_.remove(transfer);
}

void TransferWatch::note(std::string line) {
  const std::scoped_lock lock(mutex_);
  if (notes_.size() < kWatchNotesMax) notes_.push_back(std::move(line));
}

std::vector<std::string> TransferWatch::take_notes() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(notes_, {});
}

void TransferWatch::run() {
  const std::chrono::duration<double> period(timeout_s_ / TransferAges::kTicksOfTimeout);
  std::unique_lock lock(mutex_);
  while (!stop_wanted_.wait_for(lock, period, [this] { return is_stopping_; })) {
    if (!look()) continue;
    const Error error(ErrorCode::kTimeout,
                      fmt::format("storage has not answered for {:.3g} s (storage.timeout); check "
                                  "the drive (smartctl, dmesg); {}",
                                  timeout_s_, list()));
    is_stuck_.store(true, std::memory_order_release);  // a waiter that sees it need not wait
    lock.unlock();
    hooks_.on_stuck(error);
    return;
  }
}

bool TransferWatch::look() {
  return in_flight_.tick([this](const Transfer& slow) {
    if (notes_.size() < kWatchNotesMax)
      notes_.push_back(
          fmt::format("storage is slow: {}, and its drive has completed nothing for {:.3g} s",
                      hooks_.describe(slow), timeout_s_ / 4));
  });
}

std::string TransferWatch::list() const {
  const std::vector<TransferAges::Age> ages = in_flight_.ages();
  std::string text = fmt::format("{} in flight:", ages.size());
  for (std::size_t i = 0; i < std::min(ages.size(), kListedMax); ++i) {
    text += fmt::format("\n  {}, for {:.3g} s", hooks_.describe(*ages[i].transfer),
                        ages[i].ticks * timeout_s_ / TransferAges::kTicksOfTimeout);
  }
  if (ages.size() > kListedMax) text += fmt::format("\n  and {} more", ages.size() - kListedMax);
  return text;
}

}  // namespace sluice
