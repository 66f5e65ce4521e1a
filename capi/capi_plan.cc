// Plans of runs behind the C interface.
#include <string>

#include <nlohmann/json.hpp>

#include <sluice/config_document.h>
#include <sluice/plan.h>

#include "capi/call_guard.h"
#include "capi/model.h"
#include "capi/sluice_gpu.h"
#include "capi/thread_text.h"
#include "engine/plan/striping.h"

using namespace sluice;

namespace {

nlohmann::ordered_json json_of(const Plan& planned) {
  nlohmann::ordered_json pools = nlohmann::ordered_json::array();
  for (const Pool& pool : planned.pools)
    pools.push_back({{"tier", name_of(pool.tier)},
                     {"name", pool.name},
                     {"size_bytes", pool.size_bytes},
                     {"reason", pool.reason}});
  return {{"pools", pools},
          {"device_bytes", planned.device_bytes},
          {"host_bytes", planned.host_bytes},
          {"nvme_bytes", planned.nvme_bytes},
          {"device_budget_bytes", planned.device_budget_bytes},
          {"host_budget_bytes", planned.host_budget_bytes},
          {"policy", name_of(planned.policy)},
          {"nvme_read_bytes", planned.traffic.nvme_read_bytes},
          {"nvme_write_bytes", planned.traffic.nvme_write_bytes}};
}

// `machine` gives the machine that a config is planned for.
template <typename MachineOf>
sluice_status plan_text(const char* name, const char* config_json, const sluice_model* model,
                        const char** plan_json, const MachineOf& machine) {
  return guarded([&] {
    require(plan_json, name, "the place for the plan");
    *plan_json = nullptr;
    require(config_json, name, "config_json");
    require(model, name, "the model");
    const Config config = engine_config(ConfigDocument(config_json, "config"));
    const ModelSpec spec = model_from_c(*model, config.precision.parameters);
    const Plan planned = plan(config, spec, machine(config));
    // As an engine that makes scratch files. A durable store that is there needs no weights.
    if (planned.nvme_bytes != 0 && config.storage.state.name.empty())
      (void)storage_weights(config.storage);
    *plan_json = keep_text(ThreadText::kPlan, json_of(planned).dump());
  });
}

}  // namespace

extern "C" {

sluice_status sluice_plan(const char* config_json, const sluice_model* model,
                          const char** plan_json) {
  return plan_text(__func__, config_json, model, plan_json, this_machine);
}

sluice_status sluice_plan_on_gpu(const char* config_json, const sluice_model* model,
                                 const char** plan_json) {
  return plan_text(__func__, config_json, model, plan_json, [](const Config& config) {
    Config beside = config;
    beside.memory.device_bytes = 0;  // none of the host's memory
    RunMachine machine = this_machine(beside);
    machine.device_is_host = false;
    machine.device_bytes = RunMachine{}.device_bytes;
    return machine;
  });
}

}  // extern "C"
