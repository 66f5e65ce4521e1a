// The sum that a reduction over ranks has to give. Element i of the target is the sum of the
// elements i of all sources. The elements are added in fp32 in the order of the sources. The result
// is rounded once to the target's type. This order is part of the definition. So the bits do not
// depend on which rank adds, or on how the data is divided. The header is in base/ because two
// modules need it: gpu/ in its collectives, and cpu_optim/rank_sum.h, which computes the sum.
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
