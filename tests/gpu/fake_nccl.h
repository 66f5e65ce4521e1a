// What the stand-in for NCCL (fake_nccl.cc) has been asked for since the last call: found by its
// symbol in the library. Thread rule: any thread.
#pragma once

struct fake_nccl_counts {
  int reductions = 0;   // by NCCL itself
  int buffers = 0;      // registered and not given back
  int windows = 0;      // as buffers
  int allocations = 0;  // as buffers
};

extern "C" fake_nccl_counts fake_nccl_take_counts();
