// The cost of a status page per step: CPU time and time of StatusPage::write() and of the counters
// that its caller reads, as `sluice train` does after every step. A benchmark: it asserts nothing.
//
//   XDG_RUNTIME_DIR=DIR status_cost
#include <ctime>

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "base/trace/trace.h"
#include "engine/run/status_page.h"

namespace sluice {
namespace {

constexpr int kBatch = 1000;
constexpr int kBatches = 51;

double cpu_now_us() {
  timespec now{};
  (void)::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

int measure() {
  StatusPage page(status_folder());
  if (!page.is_there()) {
    fmt::print("XDG_RUNTIME_DIR is not set\n");
    return 2;
  }
  std::vector<double> times_us;
  for (int batch = 0; batch < kBatches; ++batch) {
    const double begin_us = cpu_now_us();
    for (int i = 0; i < kBatch; ++i) {
      RunStatus status{};
      status.step = trace_counts()[0].spans;
      page.write(status);
    }
    times_us.push_back((cpu_now_us() - begin_us) / kBatch);
  }
  std::ranges::sort(times_us);
  fmt::print("{:.3f} us of CPU per step, 10th and 90th percentile {:.3f} and {:.3f}\n",
             times_us[kBatches / 2], times_us[kBatches / 10], times_us[kBatches * 9 / 10]);
  return 0;
}

}  // namespace
}  // namespace sluice

int main() {
  return sluice::measure();
}
