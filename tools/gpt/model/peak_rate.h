// The rate that the matrix products of this machine reach by themselves, as the peak that a step's
// rate is compared with.
#pragma once

#include "tools/gpt/model/matmul_choice.h"

namespace sluice::gpt {

// Operations per second (two for each multiply-add) of the fastest of several products of square
// matrices, with the given threads and the library and factors of `choice`. Takes about half a
// second and 12 MiB.
// Fails with: kOutOfMemory.
double measured_peak_flops(unsigned threads, const MatmulChoice& choice);

}  // namespace sluice::gpt
