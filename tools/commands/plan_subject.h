// The subject of `sluice plan`: the model, the machine and the rates that the options and the
// config describe. The struct is plain data.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "engine/plan/host_memory.h"
#include "engine/planner/planner.h"
#include "tools/gpt/train/order_choice.h"
#include "tools/report/plan_rates.h"

namespace sluice {

struct PlanSubject {
  PlanRequest request;
  bool is_on_host = true;
  unsigned host_threads = 0;       // that compute, where this machine is planned for; 0 = otherwise
  bool is_of_this_machine = true;  // and of the config's model, so that train could be started here
  HostMemory host;
  std::uint64_t activation_bytes = 0;  // that the application keeps
  PlanRates rates;
  // If --nodes is given, the number of ranks on one host. These ranks share the host's memory and
  // drives. If --nodes is not given, the value is 1.
  std::uint32_t sharing_ranks = 1;
  std::optional<std::uint64_t> drive_bytes;  // space on storage for this rank
  std::optional<double> rated_bytes;         // that the drives take in their life, for this rank
  std::array<OrderPlan, 2> orders;
  std::string obstacle_here;  // why train would refuse here what the budgets allow
  std::string remedy;         // another one, where the config does not fit; may be empty
  double parameters = 0;      // of the whole model
  double active_parameters = 0;
  // The operations of the matrix products that a step computes on this rank, forward and backward.
  // Recomputation is not included.
  double model_flops = 0;
  std::optional<double> peak_flops;  // of the GPU that --gpu names
  std::string tensors;               // JSON, if --tensors asks for it
  std::string description;
  double tokens = 0;  // of a step and rank
};

}  // namespace sluice
