// These functions wait for work on a GPU before the memory of that work is freed. A wait may fail
// while the GPU is still working. If one wait fails, the functions wait again in another way. If
// the GPU itself has failed, each further attempt to wait ends at once.
// Thread rule: any thread may call every function.
#pragma once

namespace sluice {

// Both functions return 0 or the first failure. The failure is a cudaError_t. `event` is a
// cudaEvent_t of the GPU.
int wait_for_cuda_event(int ordinal, void* event) noexcept;
// The function waits for the work that is on `stream`, a cudaStream_t. The function records `event`
// after this work, and waits for `event`.
int wait_for_cuda_stream(int ordinal, void* stream, void* event) noexcept;

}  // namespace sluice
