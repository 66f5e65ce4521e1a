// ZeRO: what ranks share, and where the state lives.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include "base/topology.h"
#include "tools/deepspeed/import_pass.h"

namespace sluice {
namespace {

const std::string kZero = "zero_optimization.";
const std::string kParameters = "zero_optimization.offload_param.";
const std::string kOptimizer = "zero_optimization.offload_optimizer.";

std::string tier_of(const std::string& device) {
  return device == "cpu" ? "host" : device;
}

// storage.paths name a folder once. "/drive" and "/drive/" are one folder, also where it is not
// there, and so are a link and its target.
bool is_same_folder(const std::filesystem::path& one, const std::filesystem::path& other) {
  namespace fs = std::filesystem;
  std::error_code none;
  return fs::equivalent(one, other, none) ||
         fs::absolute(one / "").lexically_normal() == fs::absolute(other / "").lexically_normal();
}

// The old flags, where the new section is missing.
void take_old_form(ImportPass& pass, const std::string& flag, const std::string& section) {
  const ImportPass::Entry* entry = pass.find(kZero + flag);
  if (entry == nullptr) return;
  if (pass.has_section(kZero + section))
    return pass.refuse(kZero + flag,
                       fmt::format("\"{}\" says it in the new form; remove this", section));
  pass.understood(kZero + flag, fmt::format("the old form of {}.device: \"{}\"", section,
                                            entry->value == true ? "cpu" : "none"));
  if (entry->value == true) pass.set_entry(kZero + section + ".device", "cpu");
}

// Where the file puts a state: device, host or nvme.
std::string home_of(ImportPass& pass, const std::string& section, std::uint64_t stage) {
  const std::string key = section + "device";
  std::string device = pass.text(key).value_or("none");
  if (device == "none") return "device";
  const bool is_parameters = section == kParameters;
  if (stage == 0 || (is_parameters && stage < 3)) {
    pass.understood(
        key, fmt::format("stage {} ignores it, as in DeepSpeed; {}", stage,
                         is_parameters ? "stage 3 is what it needs" : "stages 1 to 3 do not"));
    return "device";
  }
  if (device == "nvme" && stage < 3) {
    pass.understood(key, fmt::format("at stage {} nvme is cpu, as in DeepSpeed", stage));
    device = "cpu";
  }
  if (device == "nvme" && !pass.text(section + "nvme_path")) {
    pass.refuse(key, "it is \"nvme\", but \"nvme_path\" beside it is missing: write the folder");
  }
  return tier_of(device);
}

void import_placement(ImportPass& pass, std::uint64_t stage) {
  const std::string parameters = home_of(pass, kParameters, stage);
  std::string optimizer = home_of(pass, kOptimizer, stage);
  std::string why;
  const bool is_shared = pass.number(kOptimizer + "ratio").value_or(1) < 1;
  if (is_shared) {
    optimizer = "auto";
  } else if (optimizer == "device" && parameters != "device") {
    optimizer = "auto";
    why = "on the device it would need the parameters there";
  } else if (optimizer == "device" && pass.values().device == "host") {
    optimizer = "host";
    why = "the device is the host";
  }
  pass.map(kParameters + "device", "placement.parameters", parameters);
  pass.map(kOptimizer + "device", "placement.optimizer", optimizer, why);
  if (is_shared)
    pass.map(kOptimizer + "ratio", "placement.optimizer", optimizer,
             "as much of it stays on the device as memory.device holds");
  std::vector<std::string> paths;
  for (const std::string& section : {kParameters, kOptimizer}) {
    const auto path = pass.text(section + "nvme_path");
    if (!path || pass.text(section + "device") != "nvme") continue;
    const auto is_same = [&](const std::string& other) { return is_same_folder(other, *path); };
    if (std::ranges::none_of(paths, is_same)) paths.push_back(*path);
    pass.map(section + "nvme_path", "storage.paths", paths,
             "blocks of all kinds are spread over all paths");
  }
}

void import_sharding(ImportPass& pass) {
  if (const auto elements = pass.integer(kZero + "stage3_param_persistence_threshold")) {
    const OrderedJson precision = pass.config.value("precision", OrderedJson::object());
    const std::uint64_t bytes = precision.value("parameters", "bf16") == "fp32" ? 4 : 2;
    // The largest that DeepSpeed's users write, 1e14, is still a size.
    const std::uint64_t most = std::uint64_t{1} << 60;
    pass.map(kZero + "stage3_param_persistence_threshold", "sharding.keep_gathered",
             fmt::format("{}", std::min(*elements, most) * bytes),
             "bytes; DeepSpeed counts a tensor's elements, Sluice a unit's bytes");
  }
  for (const char* name : {"zero_hpz_partition_size", "mics_shard_size"}) {
    const auto ranks = pass.number(kZero + name);
    if (!ranks) continue;
    if (*ranks > (std::string(name) == "mics_shard_size" ? 0 : 1)) {
      pass.map(kZero + name, "sharding.group", static_cast<std::uint64_t>(*ranks),
               find_deepspeed_key(kZero + name)->why);
    } else {
      pass.not_needed(kZero + name, "it is off");
    }
  }
}

}  // namespace

void import_zero(ImportPass& pass) {
  if (const ImportPass::Entry* flat = pass.find("zero_stage");
      flat != nullptr && pass.find(kZero + "stage") == nullptr && flat->value.is_number_integer())
    pass.set_entry(kZero + "stage", flat->value);
  take_old_form(pass, "cpu_offload", "offload_optimizer");
  take_old_form(pass, "cpu_offload_param", "offload_param");
  const std::uint64_t stage = pass.integer(kZero + "stage").value_or(0);
  pass.map(kZero + "stage", "sharding.stage", stage);
  import_placement(pass, stage);
  import_sharding(pass);
  if (pass.values().device != "auto") pass.config["run"]["device"] = pass.values().device;
  if (const auto share = pass.number(kOptimizer + "cpuadam_cores_perc")) {
    const double cores = granted_threads(0);
    pass.map(kOptimizer + "cpuadam_cores_perc", "run.threads",
             static_cast<std::uint64_t>(std::max(1.0, std::round(*share * cores))),
             fmt::format("of {} cores here", cores));
  }
}

void import_storage(ImportPass& pass) {
  if (const auto depth = pass.integer("aio.queue_depth"))
    pass.map("aio.queue_depth", "storage.queue_depth", *depth);
  const auto stage = pass.integer(kZero + "stage").value_or(0);
  if (pass.boolean(kZero + "compute_grad_norm") == false && (stage == 0 || stage == 3))
    pass.refuse(kZero + "compute_grad_norm",
                "DeepSpeed refuses false except at stages 1 and 2; remove it");
  if (pass.number(kOptimizer + "ratio").value_or(1) < 1 && stage != 3)
    pass.refuse(kOptimizer + "ratio", "DeepSpeed refuses it below stage 3; remove it");
}

}  // namespace sluice
