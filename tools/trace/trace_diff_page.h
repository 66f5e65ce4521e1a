// The page of `sluice trace diff --html`: a verdict, bars of both traces, and a table of every
// change with its confidence interval. The page needs no script and no other file.
//
// Thread rule: pure.
#pragma once

#include <string>

#include "tools/trace/trace_diff.h"

namespace sluice {

// `before` and `after` name the traces.
std::string diff_page(const TraceDiff& diff, const std::string& before, const std::string& after);

}  // namespace sluice
