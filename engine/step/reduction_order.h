// A number that stands for the order in which a step's gradients arrive. All ranks have to
// interleave announced uses and scheduled uses in the same way. The ranks compare their orders only
// by this number. All gradients are reduced in one sequence. So if two ranks had different orders,
// gradients of different units would be added.
//
// Thread rule: one thread.
#pragma once

#include <bit>
#include <cstdint>

#include <sluice/ids.h>

namespace sluice {

// Mixes `value` into `hash`. The result depends on the order in which values are mixed.
inline std::uint64_t mixed_hash(std::uint64_t hash, std::uint64_t value) {
  return std::rotl((hash ^ value) * 0x9e3779b97f4a7c15u, 29);
}

class ReductionOrder {
 public:
  void begin() { hash_ = 0; }
  void note(UnitId unit) { hash_ = mixed_hash(hash_, index_of(unit) + std::uint64_t{1}); }
  std::uint64_t hash() const { return hash_; }

 private:
  std::uint64_t hash_ = 0;
};

}  // namespace sluice
