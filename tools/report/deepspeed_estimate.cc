#include "tools/report/deepspeed_estimate.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>

namespace sluice {
namespace {

// The estimators' allowance for buffers in host memory.
constexpr double kBufferFactor = 1.5;

// The products and quotients below are in the estimators' order, so that roundings are the same.
std::uint64_t whole(double bytes) {
  return static_cast<std::uint64_t>(bytes);
}

DeepspeedEstimate stage_2(const DeepspeedSubject& subject, bool offload) {
  const auto parameters = static_cast<double>(subject.parameters);
  const std::uint64_t gpus = std::uint64_t{subject.gpus_per_node} * subject.nodes;
  DeepspeedEstimate estimate{.stage = 2, .offload_optimizer = offload};
  if (offload) {
    estimate.gpu_bytes = 2 * subject.parameters;
    estimate.cpu_bytes = whole(
        parameters * static_cast<double>(std::max<std::uint64_t>(4 * gpus, 16)) * kBufferFactor);
  } else {
    estimate.gpu_bytes =
        2 * subject.parameters + whole(18 * parameters / static_cast<double>(gpus));
    estimate.cpu_bytes = whole(parameters * 4 * subject.gpus_per_node * kBufferFactor);
  }
  return estimate;
}

DeepspeedEstimate stage_3(const DeepspeedSubject& subject, DeepspeedEstimate estimate) {
  const auto parameters = static_cast<double>(subject.parameters);
  const double gpus = static_cast<double>(subject.gpus_per_node) * subject.nodes;
  const double node_share = 1.0 / subject.nodes;
  estimate.gpu_bytes = 4 * subject.largest_module;
  if (!estimate.offload_optimizer) {
    estimate.gpu_bytes += whole(18 * parameters / gpus);
    const auto counted =
        static_cast<double>(estimate.zero_init ? subject.largest_module : subject.parameters);
    estimate.cpu_bytes = whole(counted * 4 * subject.gpus_per_node * kBufferFactor);
    return estimate;
  }
  if (!estimate.offload_parameters) estimate.gpu_bytes += whole(2 * parameters / gpus);
  const double bytes = estimate.offload_parameters ? 18 : 16;
  estimate.cpu_bytes =
      estimate.zero_init
          ? whole(parameters * bytes * node_share * kBufferFactor)
          : whole(parameters * std::max(4.0 * subject.gpus_per_node, bytes * node_share) *
                  kBufferFactor);
  return estimate;
}

}  // namespace

std::string DeepspeedEstimate::options() const {
  const auto place = [](bool is_offloaded) { return is_offloaded ? "cpu " : "none"; };
  if (stage == 2) return fmt::format("stage 2, offload_optimizer={}", place(offload_optimizer));
  return fmt::format("stage 3, offload_param={}, offload_optimizer={}, zero_init={}",
                     place(offload_parameters), place(offload_optimizer), zero_init ? 1 : 0);
}

DeepspeedSubject deepspeed_subject(const ModelSpec& model, std::uint32_t gpus,
                                   std::uint32_t nodes) {
  DeepspeedSubject subject{.gpus_per_node = gpus / nodes, .nodes = nodes};
  std::map<std::string, std::uint64_t> modules;
  for (const UnitSpec& unit : model.units) {
    for (const TensorSpec& tensor : unit.tensors) {
      const std::size_t dot = tensor.name.rfind('.');
      modules[dot == std::string::npos ? "" : tensor.name.substr(0, dot)] += tensor.element_count();
      subject.parameters += tensor.element_count();
    }
  }
  for (const auto& [name, parameters] : modules)
    subject.largest_module = std::max(subject.largest_module, parameters);
  return subject;
}

std::vector<DeepspeedEstimate> deepspeed_estimates(const DeepspeedSubject& subject) {
  std::vector<DeepspeedEstimate> rows = {stage_2(subject, true), stage_2(subject, false)};
  for (const auto& [optimizer, parameters] :
       {std::pair(true, true), std::pair(true, false), std::pair(false, false)}) {
    for (const bool zero_init : {true, false})
      rows.push_back(stage_3(subject, {.stage = 3,
                                       .offload_parameters = parameters,
                                       .offload_optimizer = optimizer,
                                       .zero_init = zero_init}));
  }
  return rows;
}

std::string deepspeed_table(const DeepspeedSubject& subject) {
  std::string text = fmt::format(
      "\nDeepSpeed's estimators, {} node{} of {} GPU{}, {}M parameters, {}M in the largest "
      "module:\n"
      "  per CPU  |  per GPU |   options\n",
      subject.nodes, subject.nodes == 1 ? "" : "s", subject.gpus_per_node,
      subject.gpus_per_node == 1 ? "" : "s", subject.parameters / 1'000'000,
      subject.largest_module / 1'000'000);
  constexpr double kGiB = 1 << 30;
  for (const DeepspeedEstimate& row : deepspeed_estimates(subject))
    text += fmt::format(" {:7.2f}GB | {:6.2f}GB | {}\n", static_cast<double>(row.cpu_bytes) / kGiB,
                        static_cast<double>(row.gpu_bytes) / kGiB, row.options());
  return text;
}

}  // namespace sluice
