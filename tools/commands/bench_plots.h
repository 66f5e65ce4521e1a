// The pictures that `sluice bench ... --plot` draws. The pictures show the same figures that the
// command prints.
//
// Thread rule: any thread. The functions are pure.
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

// The picture shows rates by pattern, request size and depth, for all paths together and for each
// path alone. The picture also shows the smallest and the largest rate that the rounds measured.
// Requires: at least one series.
std::string io_plot(std::span<const IoSeries> series, const std::vector<std::string>& paths);
// The picture shows the median and the quartiles of four speeds: the update, the limit, memcpy and
// triad.
// Requires: at least one result.
std::string adam_plot(std::span<const BenchResult> results);
// The picture shows the times of steps next to T_bound and T_min.
// Requires: at least one regime.
std::string step_plot(std::span<const RegimeResult> regimes);
// The picture compares the times of training steps with T_min, and with the time of computation
// alone. `document` is the output of `bench gpu --json`.
std::string gpu_plot(const nlohmann::ordered_json& document);
// The picture compares the measured times of steps with the planned times, by ZeRO stage and
// offload. `document` is the output of `bench matrix --json`.
std::string matrix_plot(const nlohmann::ordered_json& document);

}  // namespace sluice
