// A stand-in for cuBLASLt (fake_cublaslt.cc). The stand-in's library has the name of the real
// library. If a program is linked to the stand-in, code that opens the library at run time finds
// the stand-in. The work runs on the stand-in for the CUDA runtime. The stand-in imitates the
// inexact sums and the limits that the real library may have. The stand-in splits every sum in two
// parts. Where it splits depends on all that it is told when it chooses an algorithm: extents,
// strides, the number of products and the alignment of addresses. So two products whose
// descriptions differ have other bits. The stand-in then adds the parts in the least exact way that
// the caller allows. A product whose addresses are less aligned than was promised fails. The
// stand-in has no algorithm for a bf16 matrix if the matrix's rows do not begin at multiples of 16
// bytes. Thread rule: any thread.
#pragma once

struct fake_cublaslt_counts {
  int products = 0;      // products that were enqueued
  int refused = 0;       // products for which there was no algorithm
  int rounded_sums = 0;  // products whose parts were rounded to the result's type
  int objects = 0;       // descriptors that were made and not released
};

// Returns the counts, and then sets all counts to 0.
extern "C" fake_cublaslt_counts fake_cublaslt_take_counts();
// Makes call number `call` fail. The calls are counted from 1, beginning with the next call. With
// 0, no call fails. Calls that release something never fail. Returns whether the program has made
// the call that the previous fake_cublaslt_fail_at() selected.
extern "C" bool fake_cublaslt_fail_at(int call);
