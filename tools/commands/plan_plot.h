// `sluice plan --plot` draws the time of a step against the budget of host memory. The picture also
// shows how long each resource works during the step.
#pragma once

#include <optional>
#include <string>

#include "tools/commands/plan_subject.h"

namespace sluice {

// Returns the picture as SVG. The result is empty if no budget of host memory is enough for the
// config and its drives.
std::optional<std::string> plan_plot(const PlanSubject& subject);

}  // namespace sluice
