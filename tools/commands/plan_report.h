// The functions print the plan, and write the plan's JSON file.
//
// Thread rule: only the thread that runs the command calls the functions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/cli/output_file.h"
#include "tools/commands/plan_command.h"
#include "tools/commands/plan_subject.h"
#include "tools/report/plan_matrix.h"

namespace sluice {

struct PlanFindings {
  std::string verdict;  // the first line
  // If a step has at least this many tokens per rank, computation hides all other work.
  std::optional<double> free_tokens;
  std::vector<MatrixRow> matrix;  // with --matrix
};

// Returns the verdict. The verdict says whether the config fits, how long a step takes, and which
// resource limits the step. The verdict also suggests the smallest change that would help.
std::string plan_verdict(const std::vector<PlannedPlacement>& all, const PlanSubject& subject);

// The first element of the list `all` is the placement that the config names.
void print_plan(const PlanOptions& options, const PlanSubject& subject,
                const std::vector<PlannedPlacement>& all, const PlanFindings& findings);
void write_plan(const PlanOptions& options, const PlanSubject& subject,
                const std::vector<PlannedPlacement>& all, const PlanFindings& findings,
                OutputFile& output);

}  // namespace sluice
