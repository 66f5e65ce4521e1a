// A model of the time that a sequence of runtime calls takes on a GPU. The model also gives the
// share of this time in which the link upwards moves bytes. The file link_costs.json has the costs
// with their sources.
//
//   - one thread makes the calls, one after another;
//   - streams are spread over the hardware queues in the order of their first call. The head of a
//     queue blocks all calls behind it, of every stream, until everything that the head waits for
//     is over;
//   - each direction of the link moves one copy at a time;
//   - a callback stops its stream until a thread of the runtime has run it.
// The model knows no wall clock: equal calls give equal times. The caller never waits for results
// in the model. So a sequence may take longer in reality if its calls depend on results of other
// calls.
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
// The test fails if a number or a source is missing.
LinkCosts read_link_costs(const std::string& path);

// The share of time in which bytes moved upwards, from the begin of the first copy upwards to the
// end of the last copy upwards. `callback_ns` is the time that a callback stops its stream.
double share_of_link(std::span<const FakeCudaCall> calls, const LinkCosts& costs,
                     double callback_ns);

}  // namespace sluice::test
