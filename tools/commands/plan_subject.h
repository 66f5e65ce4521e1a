// The subject of `sluice plan`: the model, the machine and the rates that the options and the
// config describe. The struct is plain data.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "engine/plan/host_memory.h"
#include "engine/planner/order_choice.h"
#include "engine/planner/planner.h"
#include "tools/report/plan_rates.h"

namespace sluice {

struct PlanSubject {
  PlanRequest request;
  bool is_on_host = true;
  unsigned host_threads = 0;  // computing threads, if the plan is for this machine; otherwise 0
  // The value is true if the plan is for this machine and the config's model. `sluice train` could
  // then run the planned config here.
  bool is_of_this_machine = true;
  HostMemory host;
  std::string origin_of_device_bytes;  // where --gpu has given memory.device: in words
  std::string remedy_of_device_bytes;  // where the config's own placement needs more: ": give ..."
  std::uint64_t activation_bytes = 0;  // the activations that the application keeps
  PlanRates rates;
  // The number of ranks on one host if --nodes is given, and 1 otherwise. The ranks on a host share
  // the host's memory and drives.
  std::uint32_t sharing_ranks = 1;
  std::optional<std::uint64_t> drive_bytes;  // space on storage for this rank
  std::optional<double> rated_bytes;         // bytes that this rank may write in the drives' life
  std::array<OrderPlan, 2> orders;
  std::string obstacle_here;  // the reason why `sluice train` would refuse the plan here
  std::string remedy;         // a further remedy if the config does not fit, or ""
  double parameters = 0;      // of the whole model
  double active_parameters = 0;
  // The number of operations in the matrix products that a step computes on this rank. The number
  // covers the forward pass and the backward pass. Recomputation is not included.
  double model_flops = 0;
  std::optional<double> peak_flops;  // of the GPU that --gpu names
  std::string tensors;               // the tensors as JSON, if --tensors is given
  std::string description;
  double tokens = 0;  // per step and rank
};

}  // namespace sluice
