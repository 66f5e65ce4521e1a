// What each ZeRO stage leaves on one of several ranks, as `sluice plan --stages` shows it: bytes of
// the state by kind. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "engine/config.h"
#include "engine/model_spec.h"

namespace sluice {

// Of one rank, at rest; `window` is what stage 3 brings together on the device, for the leases and
// two units ahead. Parameters include all of what stage 3 keeps gathered.
struct StageMemory {
  std::uint64_t parameter_bytes = 0;
  std::uint64_t window_bytes = 0;
  std::uint64_t gradient_bytes = 0;
  std::uint64_t optimizer_bytes = 0;
};

// By stage. `model` is the whole one.
std::array<StageMemory, 4> memory_by_stage(const Config& config, const ModelSpec& model,
                                           std::uint32_t ranks);
std::string stage_table(const Config& config, const ModelSpec& model, std::uint32_t ranks);

}  // namespace sluice
