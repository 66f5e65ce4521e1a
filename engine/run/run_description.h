// Describes a run as text. The text contains everything that determines the order of collectives
// and the bits of their results. Ranks compare these texts before the first step. Thread rule: the
// function is pure.
#pragma once

#include <cstdint>
#include <string>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"

namespace sluice {

std::string describe_run(const Config& config, const ModelSpec& model, const Layout& layout,
                         const Placement& placement, std::uint64_t device_bytes,
                         std::uint64_t scheduled_step);

}  // namespace sluice
