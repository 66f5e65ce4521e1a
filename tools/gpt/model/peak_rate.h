// The peak rate is the rate that this machine's matrix products reach when nothing else runs.
// Reports compare a step's rate with the peak rate.
#pragma once

#include "tools/gpt/model/matmul_choice.h"

namespace sluice::gpt {

// Measures several products of square matrices on `threads` threads. `choice` gives the library and
// the type of the factors. Returns the operations per second of the fastest product. A multiply-add
// counts as two operations. The measurement takes about half a second, and needs 12 MiB of memory.
// Fails with kOutOfMemory if there is not enough memory.
double measured_peak_flops(unsigned threads, const MatmulChoice& choice);

}  // namespace sluice::gpt
