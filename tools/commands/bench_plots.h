// The pictures of `sluice bench ... --plot`, drawn from the figures that the command prints.
//
// Thread rule: pure.
#pragma once

#include <span>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tools/bench/bench_adam.h"
#include "tools/bench/io_bench.h"
#include "tools/bench/io_calibration.h"
#include "tools/bench/step_regimes.h"

namespace sluice {

// The picture shows the rates of all paths together and of each path alone, by pattern, request and
// depth. The picture includes the smallest and the largest rate of the rounds. Requires: at least
// one series.
std::string io_plot(std::span<const IoSeries> series, const std::vector<std::string>& paths);
// The picture shows the update beside its limit, memcpy and triad, with quartiles. Requires: at
// least one result.
std::string adam_plot(std::span<const BenchResult> results);
// Steps beside T_bound and T_min. Requires: at least one regime.
std::string step_plot(std::span<const RegimeResult> regimes);
// The picture shows training steps beside T_min and beside computation alone. The picture is drawn
// from the document of `bench gpu --json`.
std::string gpu_plot(const nlohmann::ordered_json& document);

}  // namespace sluice
