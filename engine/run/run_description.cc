#include "engine/run/run_description.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "engine/config/config_text.h"

namespace sluice {
namespace {

// The keys in which ranks may differ: their hosts do, and none of these changes a bit or the order
// of collectives. A key that is not listed has to be the same on all.
constexpr const char* kOfEachRank[] = {"/memory",
                                       "/placement",
                                       "/run",
                                       "/optimizer/lanes",
                                       "/optimizer/overlap",
                                       "/storage/paths",
                                       "/storage/weights",
                                       "/storage/calibration",
                                       "/storage/backend",
                                       "/storage/queue_depth",
                                       "/storage/verify",
                                       "/storage/timeout",
                                       "/storage/block_elements",
                                       "/activations",
                                       "/sharding/timeout"};

std::string shared_settings(const Config& config) {
  nlohmann::ordered_json settings = nlohmann::ordered_json::parse(config_text(config));
  for (const char* const key : kOfEachRank) {
    const nlohmann::ordered_json::json_pointer place(key);
    if (settings.contains(place)) settings[place.parent_pointer()].erase(place.back());
  }
  return settings.dump();
}

}  // namespace

std::string describe_run(const Config& config, const ModelSpec& model, const Layout& layout,
                         const Placement& placement, std::uint64_t device_bytes,
                         std::uint64_t scheduled_step) {
  std::string text =
      fmt::format("device {}, window {}, announced window {} of {}, leases {}, step {}\n{}\n",
                  device_bytes, placement.window_bytes, placement.announced_window.count,
                  placement.announced_window.slot_bytes, model.concurrent_leases, scheduled_step,
                  shared_settings(config));
  // Checkpoints beside training have collectives of their own, however many buffers they have.
  text += fmt::format("saves beside training: {}\n", placement.save_buffers.count != 0);
  for (const UnitSpec& unit : model.units) {
    // The names of local units are those of each rank.
    text += fmt::format("unit {}{}{}{}{}\n", unit.is_local ? "of the rank's own" : unit.name,
                        unit.is_announced ? " announced" : "", unit.is_pinned ? " pinned" : "",
                        unit.is_frozen ? " frozen" : "",
                        unit.is_opaque ? " opaque" : "");
    for (const TensorSpec& tensor : unit.tensors)
      text += fmt::format("{} {} {}\n", unit.is_local ? "" : tensor.name,
                          fmt::join(tensor.shape, "x"), static_cast<int>(tensor.weight_decay));
  }
  for (const auto* order : {&model.forward_order, &model.backward_order})
    for (const UnitId unit : *order) text += fmt::format("{} ", index_of(unit));
  for (const UnitPlace& unit : layout.units())
    text += placement.unit_is_on_device(unit) ? "device " : "window ";
  return text;
}

}  // namespace sluice
