// A model of the time that a sequence of runtime calls takes on a GPU. The model also gives the
// share of this time in which the link moves bytes to the GPU. The file link_costs.json has the
// costs with their sources.
//
//   - one thread makes the calls, one after another;
//   - streams are spread over the hardware queues in the order of their first call;
//   - the first call in a queue blocks all later calls in this queue, even calls of other streams.
//     The later calls are blocked until the first call no longer has to wait;
//   - each direction of the link moves one copy at a time;
//   - a callback stops its stream until a thread of the runtime has run the callback.
// The model does not measure time, so equal calls give equal times. In the model, the caller never
// waits for results. If calls of a sequence depend on the results of other calls, the sequence may
// take longer in reality.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "tests/gpu/cuda/fake_cuda_log.h"

namespace sluice::test {

struct LinkCosts {
  double link_bytes_per_second = 0;
  double call_ns = 0;
  double copy_gap_ns = 0;
  double event_ns = 0;
  double kernel_ns = 0;
  double callback_least_ns = 0;
  double callback_most_ns = 0;
  std::uint32_t hardware_queues = 0;
};
// Reads the costs. The test fails if a number or a source is missing.
LinkCosts read_link_costs(const std::string& path);

// Returns the share of time in which bytes moved to the GPU. The time begins with the first copy to
// the GPU, and ends with the last copy to the GPU. Each callback stops its stream for
// `callback_ns`.
double share_of_link(std::span<const FakeCudaCall> calls, const LinkCosts& costs,
                     double callback_ns);

}  // namespace sluice::test
