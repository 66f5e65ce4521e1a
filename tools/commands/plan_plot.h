// `sluice plan --plot` draws the time of a step, and how long each resource works for it, over
// budgets of host memory.
#pragma once

#include <string>

#include "tools/commands/plan_subject.h"

namespace sluice {

// The picture as SVG. Fails with: kOutOfMemory if the config fits under no budget of host memory.
std::string plan_plot(const PlanSubject& subject, const std::string& obstacle);

}  // namespace sluice
