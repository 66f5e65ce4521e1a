// Sums over ranks in rank order (base/ordered_sum.h says what they are). The reference defines the
// result; the other gives the same bits, faster. As in gradient_ops.h, the caller's floating-point
// environment neither matters nor changes, and NaNs are equal only in being NaN.
//
// Thread rule: pure in their arguments, callable from any thread on disjoint memory.
#pragma once

#include "base/ordered_sum.h"

namespace sluice {

void sum_in_order_reference(const OrderedSum& sum);
void sum_in_order(const OrderedSum& sum);

}  // namespace sluice
