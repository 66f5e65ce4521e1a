// The sum that a reduction over ranks computes. Element i of the target is the sum of element i of
// every source. The elements are added in fp32 in the order of the sources, and the sum is rounded
// once to the target's type. The order is part of the definition, so the bits do not depend on the
// rank that adds, or on the division of the data. This header is in base/ because collectives
// (gpu/) use the sum and cpu_optim/rank_sum.h computes it.
//
// Thread rule: a SumFunction is callable from any thread on disjoint memory.
#pragma once

#include <cstdint>
#include <span>

#include <sluice/dtype.h>

namespace sluice {

struct OrderedSum {
  void* target = nullptr;  // disjoint from the sources, or a source of equal type
  DType target_type = DType::kFp32;
  std::span<const void* const> sources = {};  // at least one
  DType source_type = DType::kFp32;
  std::uint64_t element_count = 0;
};

// Requires: the types are equal, or one of them is fp32.
using SumFunction = void (*)(const OrderedSum& sum);

}  // namespace sluice
