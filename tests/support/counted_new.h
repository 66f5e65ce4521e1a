// These functions count the allocations by operator new in programs that are linked with
// counted_new.cc. Thread rule: any thread may allocate memory. Only one thread may call the
// functions below.
#pragma once

#include <cstdint>

namespace sluice::test {

struct Allocations {
  std::uint64_t count = 0;
  std::uint64_t bytes = 0;
  std::uint64_t largest_bytes = 0;
};

void count_allocations();   // starts to count at zero
Allocations allocations();  // returns the counts and ends counting

}  // namespace sluice::test
