// This list holds the requests that one queue has not started yet. Requests of higher priority
// leave first. Requests of the same priority leave in the order of arrival. Each request contains
// the link to the next request. So the list needs no memory of its own, and has no limit.
//
// Thread rule: a list is not thread-safe, and each queue guards its own list.
// Invariant: no request starves. If kPassedOverMax requests in a row have overtaken a waiting
// priority, a request of this priority goes next.
//   Example: the depth is 1. There is one low request, and high requests come without end. Then 16
//   high requests go first, and the low request goes next.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "io/io_queue.h"

namespace sluice {

// A larger number lets urgent requests wait for less time. A write-back then waits longer if there
// are many reads.
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
