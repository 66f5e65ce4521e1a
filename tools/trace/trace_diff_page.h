// The page that `sluice trace diff --html` writes. The page shows a verdict, bars for both traces,
// and a table of all changes with their confidence intervals. The page needs no script and no other
// file.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <string>

#include "tools/trace/trace_diff.h"

namespace sluice {

// `before` and `after` are the names of the two traces.
std::string diff_page(const TraceDiff& diff, const std::string& before, const std::string& after);

}  // namespace sluice
