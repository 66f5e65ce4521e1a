// This header defines the sum that a reduction over ranks must return. Element i of the target is
// the sum of the elements i of all sources. The elements are added in fp32 in the order of the
// sources. The result is rounded once to the target's type. The order of the additions is part of
// the definition. So the bits of the sum do not depend on the rank that computes the sum. The bits
// do not depend on the division of the data, either. The header is in base/, because two modules
// need the header: gpu/ for its collectives, and cpu_optim/ for the functions that compute the sum.
//
// Thread rule: any thread may call a SumFunction. Two calls that run at the same time need disjoint
// memory.
#pragma once

#include <cstdint>
#include <span>

#include <sluice/dtype.h>

namespace sluice {

struct OrderedSum {
  void* target = nullptr;  // disjoint from every source, or the memory of a source of the same type
  DType target_type = DType::kFp32;
  std::span<const void* const> sources = {};  // at least one
  DType source_type = DType::kFp32;
  std::uint64_t element_count = 0;
};

// Requires: the types are equal, or one of them is fp32.
using SumFunction = void (*)(const OrderedSum& sum);

}  // namespace sluice
