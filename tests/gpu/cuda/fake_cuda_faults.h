// With these functions, a test chooses the call that fails in the stand-in for the CUDA runtime. A
// test first counts the calls of a run. The test then repeats the run once for each call, and lets
// this call fail.
// Thread rule: any thread may call every function.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace sluice::test {

struct FakeCudaFault {
  // This member is the name of the function whose calls are counted. If the name is empty, all
  // calls except cudaEventQuery are counted. The number of cudaEventQuery calls differs from run to
  // run.
  std::string function = {};
  std::uint64_t at_call = 0;  // the next call is number 1; 0: none fails
  int status = 0;             // the cudaError_t that the failing call returns
  // If this member is true, every later call fails, too. For example, all later calls fail after an
  // illegal memory access by a kernel on a GPU. If this member is false, only one call fails, and
  // the GPU still works.
  bool is_lasting = false;
  bool refuses_callbacks = true;  // if is_lasting: cudaStreamAddCallback fails, too
};
// The function sets the fault, and begins to count calls.
void arm_fake_cuda_fault(const FakeCudaFault& fault);

struct FakeCudaFaultReport {
  std::uint64_t calls = 0;  // since arm_fake_cuda_fault()
  std::string failed_call;  // empty if the run had fewer calls
};
// The function stops counting calls. The function also ends a lasting failure.
FakeCudaFaultReport disarm_fake_cuda_fault();

// Sets the newest CUDA version that the driver knows, such as 11040 for 11.4. If `version` is 0,
// there is no driver.
void set_fake_cuda_driver(int version);

// Sets the compute capability of every GPU, such as 75 for 7.5. If `capability` is 0, as at first,
// the GPUs have the lowest capability that this build has code for. Returns whether this build has
// no code for `capability`. The result is false if the build does not know its architectures.
bool set_fake_cuda_capability(int capability);

// Returns the stream that replaces the default stream. At first, this stream is null. As long as
// this stream is null, a use of the default stream ends the program.
std::atomic<void*>& fake_cuda_default_stream();

// The stand-in calls this function at each call of a runtime function. The function counts the
// call. Returns 0 or the failure of the call. A lasting failure begins in this function.
int fake_cuda_fault_of(const char* call);
// The stand-in calls this function. The function returns `status`. The next cudaGetLastError() on
// this thread also returns `status`.
int fake_cuda_answer(int status);
// Returns whether calls are counted. While calls are counted, only one thread makes and destroys
// streams.
bool is_fake_cuda_fault_armed();
// The stand-in calls this function to complete all work that is on any stream.
void finish_fake_cuda_work();
// The stand-in calls this function at the end of a lasting failure. The function destroys the
// streams that the failure has kept. Otherwise, the threads of many failures would slow down a
// campaign.
void destroy_fake_cuda_streams_left();

}  // namespace sluice::test
