// These functions wait for work on a GPU before the memory of that work is freed. A wait may fail
// while the GPU is still working. So after a failed wait, the functions try other waits. If the GPU
// itself has failed, the other waits return at once.
// Thread rule: any thread may call every function.
#pragma once

namespace sluice {

// Both functions return 0 or the first failure. The failure is a cudaError_t. `event` is a
// cudaEvent_t of the GPU.
int wait_for_cuda_event(int ordinal, void* event) noexcept;
// The function waits for the work that is on `stream`, a cudaStream_t. To wait, the function
// records `event` after this work.
int wait_for_cuda_stream(int ordinal, void* stream, void* event) noexcept;

}  // namespace sluice
