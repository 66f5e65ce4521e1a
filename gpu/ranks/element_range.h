// A range of the elements that ranks reduce. Pure.
#pragma once

#include <cstdint>

namespace sluice {

struct ElementRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t count() const { return end - begin; }
};

}  // namespace sluice
