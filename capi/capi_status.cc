// `sluice top` behind the C interface.
#include <cmath>

#include <fmt/format.h>

#include "capi/call_guard.h"
#include "capi/engine_handle.h"

using namespace sluice;

namespace {

void require_rate(double value, const char* call, const char* name) {
  if (!std::isfinite(value) || value < 0)
    refuse(fmt::format("{}: {} is {}; it must be a number from 0 on, and 0 where it is not known",
                       call, name, value));
}

}  // namespace

extern "C" {

sluice_status sluice_show_status(sluice_engine* engine, const sluice_figures* figures) {
  return guarded(engine, __func__, [&](const char* name) {
    require(figures, name, "the figures");
    require_rate(figures->flops_per_token, name, "flops_per_token");
    require_rate(figures->peak_flops, name, "peak_flops");
    const StatusOptions options{.steps = figures->steps,
                                .flops_per_token = figures->flops_per_token};
    if (!engine->status) {
      engine->status.emplace(*engine->engine, options);
      if (const std::string& problem = engine->status->problem(); !problem.empty())
        engine->add_notes({&problem, 1});
    } else {
      engine->status->set_options(options);
    }
    engine->figures = {
        .loss = figures->loss, .tokens = figures->tokens, .peak_flops = figures->peak_flops};
  });
}

}  // extern "C"
