// `sluice plan --plot` draws the time of a step over budgets of host memory. The command also draws
// the time that each resource works in the step.
#pragma once

#include <optional>
#include <string>

#include "tools/commands/plan_subject.h"

namespace sluice {

// The picture as SVG. The result is empty if the config, or its drives, fit under no budget of host
// memory.
std::optional<std::string> plan_plot(const PlanSubject& subject);

}  // namespace sluice
