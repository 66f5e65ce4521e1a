// Computes sums over ranks. The ranks' values are added in the order that base/ordered_sum.h
// defines. The call sum_in_order() gives the same bits as sum_in_order_reference(), but is faster.
// The caller's floating-point environment has no effect on any result and stays unchanged. The sign
// and the payload of a NaN result may differ between the two functions.
//
// Thread rule: results depend only on the arguments. Any thread may call the functions on disjoint
// memory.
#pragma once

#include "base/ordered_sum.h"

namespace sluice {

void sum_in_order_reference(const OrderedSum& sum);
void sum_in_order(const OrderedSum& sum);

}  // namespace sluice
