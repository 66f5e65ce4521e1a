#include "tests/gpu/cuda/fake_cuda_faults.h"

#include <cuda_runtime.h>

#include <atomic>
#include <mutex>
#include <string_view>
#include <utility>

#include "tests/gpu/cuda/fake_cuda_runtime.h"

namespace sluice::test {
namespace {

struct Faults {
  std::mutex mutex;
  // Guarded by mutex.
  bool is_armed = false;
  FakeCudaFault fault;
  FakeCudaFaultReport report;
};

thread_local cudaError_t last_error = cudaSuccess;
std::atomic<int> driver_version = CUDART_VERSION;

Faults& faults() {
  static Faults only;
  return only;
}

bool is_counted(const std::string& function, std::string_view call) {
  return function.empty() ? call != "cudaEventQuery" : call == function;
}

}  // namespace

std::atomic<void*>& fake_cuda_default_stream() {
  static std::atomic<void*> only;
  return only;
}

void arm_fake_cuda_fault(const FakeCudaFault& fault) {
  const std::scoped_lock lock(faults().mutex);
  faults().is_armed = true;
  faults().fault = fault;
  faults().report = {};
}

FakeCudaFaultReport disarm_fake_cuda_fault() {
  fail_fake_cuda({.status = 0});
  destroy_fake_cuda_streams_left();
  const std::scoped_lock lock(faults().mutex);
  faults().is_armed = false;
  return std::exchange(faults().report, {});
}

bool is_fake_cuda_fault_armed() {
  const std::scoped_lock lock(faults().mutex);
  return faults().is_armed;
}

void set_fake_cuda_driver(int version) {
  driver_version = version;
}

int fake_cuda_fault_of(const char* call) {
  FakeCudaFault fault;
  {
    const std::scoped_lock lock(faults().mutex);
    if (!faults().is_armed || !is_counted(faults().fault.function, call)) return 0;
    if (++faults().report.calls != faults().fault.at_call) return 0;
    faults().report.failed_call = call;
    fault = faults().fault;
  }
  if (!fault.is_lasting) return fault.status;
  finish_fake_cuda_work();  // a real GPU would drop it
  fail_fake_cuda({.status = fault.status, .refuses_callbacks = fault.refuses_callbacks});
  return fault.status;
}

int fake_cuda_answer(int status) {
  if (status != 0) last_error = static_cast<cudaError_t>(status);
  return status;
}

}  // namespace sluice::test

extern "C" {

cudaError_t cudaGetLastError() {
  return std::exchange(sluice::test::last_error, cudaSuccess);
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = sluice::test::driver_version;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) {
  return "cudaErrorOfTheFake";
}
const char* cudaGetErrorString(cudaError_t) {
  return "an error of the fake runtime";
}

}  // extern "C"
