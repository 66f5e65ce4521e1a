// The rate that the matrix products of this machine reach when nothing else runs; a step's rate is
// compared with it.
#pragma once

#include "tools/gpt/model/matmul_choice.h"

namespace sluice::gpt {

// Measures several products of square matrices, with the given threads and the library and factors
// of `choice`. Returns the operations per second of the fastest one; a multiply-add counts as two
// operations. Takes about half a second and 12 MiB.
// Fails with: kOutOfMemory.
double measured_peak_flops(unsigned threads, const MatmulChoice& choice);

}  // namespace sluice::gpt
