// An IoQueue that wraps a real one and does what real drives do too rarely: fails a request, delays
// requests, completes them in another order. Seeded: the same seed does the same in the same order
// of submission.
#pragma once

#include <cstdint>
#include <memory>

#include "io/io_queue.h"

namespace sluice::test {

struct FaultOptions {
  std::uint64_t seed = 1;
  // The request (counted from 0 over the queue's life) that fails with `fail_error`; later ones too
  // when `sticky`.
  std::uint64_t fail_at = UINT64_MAX;
  int fail_error = 0;
  bool sticky = false;
  // Each request waits a random time up to this before it goes on, and is overtaken by others
  // meanwhile.
  std::uint32_t delay_us_max = 0;
};

std::unique_ptr<IoQueue> make_fault_queue(std::unique_ptr<IoQueue> inner,
                                          const FaultOptions& options);

}  // namespace sluice::test
