// The waiting requests of one queue, by priority. Requests of higher priority leave first. Requests
// of the same priority leave in the order of arrival. The list links the requests, so the list
// takes no memory and has no limit.
//
// Thread rule: not thread-safe; each queue guards its list.
// Invariant: no request starves. A priority that has been passed over kPassedOverMax times in a row
// goes next.
//   depth 1, one low request, then high ones without end -> 16 high ones go, then the low one
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "io/io_queue.h"

namespace sluice {

// With a larger number, urgent requests wait less for others, but a write-back waits longer during
// many reads.
inline constexpr std::uint32_t kPassedOverMax = 16;

// A request with its number in the queue's ledger. The request belongs to the caller and must live
// until on_complete.
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
