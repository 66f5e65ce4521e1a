#include "engine/store/transfer_ages.h"

#include <algorithm>

#include "io/transfer_progress.h"

namespace sluice {

void TransferAges::add(const Transfer& transfer, const IoRequest& request) {
  if (request.drive >= moved_.size()) moved_.resize(request.drive + 1);
  in_flight_.push_back({.transfer = &transfer, .request = &request});
}

void TransferAges::remove(const Transfer& transfer) {
  const auto found = std::ranges::find(in_flight_, &transfer, &Watched::transfer);
  if (found == in_flight_.end()) return;
  moved_[found->request->drive] = true;
  *found = in_flight_.back();
  in_flight_.pop_back();
}

bool TransferAges::tick(const std::function<void(const Transfer&)>& on_slow) {
  bool is_stuck = false;
  for (Watched& watched : in_flight_) {
    ++watched.ticks;
    const bool is_with_kernel = has_started(*watched.request);
    const bool has_just_left = is_with_kernel && watched.kernel_ticks == 0;
    if (is_with_kernel) ++watched.kernel_ticks;
    watched.silent_ticks = moved_[watched.request->drive] ? 0
                           : has_just_left                ? 1
                                                          : watched.silent_ticks + 1;
    if (watched.silent_ticks == kTicksOfSlow && !watched.is_noted) {
      watched.is_noted = true;
      on_slow(*watched.transfer);
    }
    is_stuck |= watched.silent_ticks > kTicksOfTimeout ||
                watched.kernel_ticks > kBusyFactor * kTicksOfTimeout;
  }
  moved_.assign(moved_.size(), false);
  return is_stuck;
}

std::vector<TransferAges::Age> TransferAges::ages() const {
  std::vector<Age> ages;
  for (const Watched& watched : in_flight_) ages.push_back({watched.transfer, watched.ticks});
  std::ranges::stable_sort(ages, std::ranges::greater(), &Age::ticks);
  return ages;
}

}  // namespace sluice
