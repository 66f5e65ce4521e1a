// A step before its end, behind the C interface: leases, announced units, and the norm.
#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "capi/call_guard.h"
#include "capi/engine_handle.h"
#include "engine/run/wait_limit.h"

using namespace sluice;

namespace {

Lease acquire(const char* name, sluice_engine& engine, UnitId unit, Pass pass,
              const Stream& stream) {
  if (engine.step) return engine.step->acquire(unit, pass, stream);
  if (!engine.inference)
    refuse(
        fmt::format("{}: neither a step nor an inference is active; sluice_begin_step() and "
                    "sluice_begin_inference() begin one",
                    name));
  if (pass != Pass::kInference)
    refuse(fmt::format("{}: an inference is active, whose pass is SLUICE_INFERENCE", name));
  return engine.inference->acquire(unit, stream);
}

// For computation on the calling thread, which waits for the stream's dependencies.
void acquire_here(sluice_lease* lease, const char* name, sluice_engine& engine, std::uint32_t unit,
                  std::int32_t pass) {
  require(lease, name, "the place for the lease");
  *lease = acquire_for(name, engine, unit, pass, engine.stream);
  engine.device->synchronize(engine.stream.id());
}

std::vector<UnitId> announce(sluice_engine& engine, std::span<const UnitId> units, Pass pass) {
  if (engine.step) return engine.step->announce(units, pass);
  if (!engine.inference)
    refuse("sluice_announce: neither a step nor an inference is active, so nothing can be used");
  if (pass != Pass::kInference)
    refuse("sluice_announce: an inference is active, whose pass is SLUICE_INFERENCE");
  return engine.inference->announce(units);
}

}  // namespace

sluice_lease sluice::acquire_for(const char* call, sluice_engine& engine, std::uint32_t unit,
                                 std::int32_t pass, const Stream& stream) {
  if (pass < SLUICE_FORWARD || pass > SLUICE_INFERENCE)
    refuse(fmt::format("{}: pass is {}; it must be a sluice_pass", call, pass));
  Lease acquired = acquire(call, engine, UnitId{unit}, static_cast<Pass>(pass), stream);
  const bool has_gradient = pass == SLUICE_BACKWARD && !engine.model.units[unit].is_frozen;
  const sluice_lease lease{.parameters = acquired.parameter(0),
                           .gradients = has_gradient ? acquired.gradient(0) : nullptr,
                           .id = engine.next_lease_id++};
  engine.leases.emplace(lease.id, HeldLease{std::move(acquired), stream.id()});
  return lease;
}

sluice_status sluice::within(sluice_engine* engine, const char* call, std::uint32_t milliseconds,
                             const std::function<void(const char* name)>& acquire) {
  bool is_pending = false;
  const sluice_status status = guarded(engine, call, [&](const char* name) {
    const WaitLimit limit{std::chrono::milliseconds(milliseconds)};
    try {
      acquire(name);
    } catch (const WaitEnded&) {
      is_pending = true;
    }
  });
  return is_pending ? SLUICE_PENDING : status;
}

extern "C" {

sluice_status sluice_acquire(sluice_engine* engine, uint32_t unit, int32_t pass,
                             sluice_lease* lease) {
  return guarded(engine, __func__,
                 [&](const char* name) { acquire_here(lease, name, *engine, unit, pass); });
}

sluice_status sluice_acquire_within(sluice_engine* engine, uint32_t milliseconds, uint32_t unit,
                                    int32_t pass, sluice_lease* lease) {
  return within(engine, __func__, milliseconds,
                [&](const char* name) { acquire_here(lease, name, *engine, unit, pass); });
}

sluice_status sluice_release(sluice_engine* engine, uint64_t lease_id) {
  return guarded(engine, __func__, [&](const char*) {
    if (engine->leases.erase(lease_id) == 0)
      refuse(fmt::format("sluice_release: lease {} does not exist or has ended", lease_id));
  });
}

sluice_status sluice_gradient_norm(sluice_engine* engine, double gradient_divisor, double* norm) {
  return guarded(engine, __func__, [&](const char* name) {
    require(norm, name, "the place for the norm");
    if (!engine->step) refuse("sluice_gradient_norm: no step is active");
    *norm = engine->step->gradient_norm(gradient_divisor == 0 ? std::nullopt
                                                              : std::optional(gradient_divisor));
  });
}

sluice_status sluice_announce(sluice_engine* engine, const uint32_t* units, uint32_t unit_count,
                              int32_t pass, uint32_t* uses, uint32_t* use_count) {
  return guarded(engine, __func__, [&](const char* name) {
    if (unit_count != 0) require(units, name, "the list of units");
    require(uses, name, "the place for the uses");
    require(use_count, name, "the place for their number");
    if (pass < SLUICE_FORWARD || pass > SLUICE_INFERENCE)
      refuse(fmt::format("{}: pass is {}; it must be a sluice_pass", name, pass));
    std::vector<UnitId> announced;
    for (std::uint32_t i = 0; i < unit_count; ++i) announced.push_back(UnitId{units[i]});
    const std::vector<UnitId> all = announce(*engine, announced, static_cast<Pass>(pass));
    std::ranges::transform(all, uses, [](UnitId unit) { return index_of(unit); });
    *use_count = static_cast<std::uint32_t>(all.size());
  });
}

}  // extern "C"
