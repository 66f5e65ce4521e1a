// The requests that one queue has not started yet, sorted by priority. Requests of higher priority
// leave first. Requests of the same priority leave in the order of arrival. The list links the
// requests themselves. So the list needs no memory of its own, and has no limit.
//
// Thread rule: a list is not thread-safe, and each queue guards its own list.
// Invariant: no request starves. Suppose that kPassedOverMax requests in a row have overtaken the
// waiting requests of one priority. Then a request of the overtaken priority goes next.
//   Example: the depth is 1. There is one low request, and high requests come without end. Then 16
//   high requests go first, and the low request goes next.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "io/io_queue.h"

namespace sluice {

// With a larger number, urgent requests wait for less time, but a write-back waits longer while
// there are many reads.
inline constexpr std::uint32_t kPassedOverMax = 16;

// A request and its ticket in the queue's ledger. The request belongs to the caller and must stay
// valid until on_complete.
struct Submission {
  IoRequest* request = nullptr;
  std::uint64_t ticket = 0;
};

class PendingList {
 public:
  std::size_t count() const { return count_; }
  void push(const Submission& submission);
  // Requires: count() is not 0.
  Submission pop();

 private:
  struct Level {
    IoRequest* first = nullptr;
    IoRequest* last = nullptr;
    std::uint32_t passed_over = 0;
  };

  std::array<Level, kIoPriorities> levels_;
  std::size_t count_ = 0;
};

}  // namespace sluice
