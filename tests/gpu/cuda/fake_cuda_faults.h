// Failures of single calls of the stand-in for the CUDA runtime. A test counts the calls of a run.
// The test then repeats the run and lets each call fail once.
// Thread rule: any thread may call every function.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace sluice::test {

struct FakeCudaFault {
  // The calls of this function are counted. If the name is empty, all calls but cudaEventQuery are
  // counted. The number of those calls differs from run to run.
  std::string function = {};
  std::uint64_t at_call = 0;  // the next call is number 1; 0: none fails
  int status = 0;             // a cudaError_t, the answer of that call
  // If true, every call fails from then on, as after a kernel's illegal access. If false, only this
  // call fails, and the GPU goes on working.
  bool is_lasting = false;
  bool refuses_callbacks = true;  // with is_lasting: cudaStreamAddCallback fails, too
};
// The count of calls begins now.
void arm_fake_cuda_fault(const FakeCudaFault& fault);

struct FakeCudaFaultReport {
  std::uint64_t calls = 0;  // since arm_fake_cuda_fault()
  std::string failed_call;  // empty: the run had fewer calls
};
// Ends the count, and a lasting failure.
FakeCudaFaultReport disarm_fake_cuda_fault();

// The newest CUDA that the driver knows, such as 11040 for 11.4; 0: there is no driver.
void set_fake_cuda_driver(int version);

// The stream that takes the place of the default stream. While it is null, which it is at first, a
// use of the default stream ends the program.
std::atomic<void*>& fake_cuda_default_stream();

// The stand-in calls this function for each call. The function counts the call, and returns its
// failure, or 0. A lasting failure begins here.
int fake_cuda_fault_of(const char* call);
// The stand-in calls this function. The function returns `status`, and cudaGetLastError() returns
// `status` next on this thread.
int fake_cuda_answer(int status);
// The stand-in asks whether calls are counted. If so, one thread makes and destroys all streams.
bool is_fake_cuda_fault_armed();
// The stand-in calls this function to complete all work that is on any stream.
void finish_fake_cuda_work();

}  // namespace sluice::test
