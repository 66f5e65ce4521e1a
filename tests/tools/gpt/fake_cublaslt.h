// A stand-in for cuBLASLt (fake_cublaslt.cc), in a library that has the real one's name. Code that
// opens the library at run time finds the stand-in if the program is linked to it. The stand-in
// computes on the stand-in for the CUDA runtime. The stand-in is as awkward as the library may be.
// The stand-in splits every sum in two, and adds the parts in the least exact way that its caller
// allows. The stand-in knows no algorithm for bf16 matrices whose rows are not 16 bytes apart.
// Thread rule: any thread.
#pragma once

struct fake_cublaslt_counts {
  int products = 0;      // that were enqueued
  int refused = 0;       // products that it had no algorithm for
  int rounded_sums = 0;  // products whose parts were rounded to the result's type
  int objects = 0;       // descriptions that were made and not given back
};

// The counts since the last call.
extern "C" fake_cublaslt_counts fake_cublaslt_take_counts();
// One call fails. The next call is number 1, and 0 means no call. Calls that release something
// never fail. Returns whether the call that was set before has come.
extern "C" bool fake_cublaslt_fail_at(int call);
