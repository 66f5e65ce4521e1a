// Sums over ranks in rank order; base/ordered_sum.h defines them. The reference gives the result;
// the other function gives the same bits, faster. As in gradient_ops.h, the caller's floating-point
// environment does not matter and stays as it is, and a NaN may differ in sign and payload.
//
// Thread rule: pure in their arguments, callable from any thread on disjoint memory.
#pragma once

#include "base/ordered_sum.h"

namespace sluice {

void sum_in_order_reference(const OrderedSum& sum);
void sum_in_order(const OrderedSum& sum);

}  // namespace sluice
