// Counts what operator new gives out, in programs that are linked with counted_new.cc.
// Thread rule: any thread allocates; one counts.
#pragma once

#include <cstdint>

namespace sluice::test {

struct Allocations {
  std::uint64_t count = 0;
  std::uint64_t bytes = 0;
  std::uint64_t largest_bytes = 0;
};

void count_allocations();   // from now on, from zero
Allocations allocations();  // since then; counting ends

}  // namespace sluice::test
