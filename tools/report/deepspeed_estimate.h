// The memory that DeepSpeed's own estimators predict for a model. A plan can show these numbers
// beside the plan's own numbers. The estimators are estimate_zero2_model_states_mem_needs() in
// deepspeed/runtime/zero/stage_1_and_2.py, and estimate_zero3_model_states_mem_needs() in
// deepspeed/runtime/zero/stage3.py. The functions in this header compute exactly the same numbers
// as the estimators. The estimators count parameters, gradients and optimizer state, but no
// activations.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <sluice/model_spec.h>

namespace sluice {

// One row of the estimators' tables.
struct DeepspeedEstimate {
  int stage = 2;
  bool offload_parameters = false;
  bool offload_optimizer = false;
  bool zero_init = false;       // only for stage 3
  std::uint64_t cpu_bytes = 0;  // per node
  std::uint64_t gpu_bytes = 0;  // per GPU

  // Returns a text such as "stage 3, offload_param=cpu, offload_optimizer=cpu, zero_init=1".
  std::string options() const;
};

struct DeepspeedSubject {
  std::uint64_t parameters = 0;
  // The largest module directly contains this many parameters. The parameters of inner modules do
  // not count.
  std::uint64_t largest_module = 0;
  std::uint32_t gpus_per_node = 1;
  std::uint32_t nodes = 1;
};

// Finds the modules by the names of tensors. A tensor's name without the last part is the name of
// the tensor's module.
DeepspeedSubject deepspeed_subject(const ModelSpec& model, std::uint32_t gpus, std::uint32_t nodes);

// Returns all rows of both estimators' tables, in the order in which the estimators print the rows.
std::vector<DeepspeedEstimate> deepspeed_estimates(const DeepspeedSubject& subject);

// Returns the tables of both estimators as text.
std::string deepspeed_table(const DeepspeedSubject& subject);

}  // namespace sluice
