#include "engine/flow/lease_guard.h"

#include <string>

#include <sluice/error.h>
#include <sluice/host_device.h>

namespace sluice {
namespace {

#ifdef NDEBUG
constexpr bool kGuardsByItself = false;
#else
constexpr bool kGuardsByItself = true;
#endif

bool can_guard(const Device& device) {
  return dynamic_cast<const HostDevice*>(&device) != nullptr;
}

}  // namespace

LeaseGuard::LeaseGuard(const Layout& layout, const Tiers& tiers, Device& device)
    : layout_(layout),
      device_(device),
      of_device_(tiers.device_memory(), "parameters and gradients"),
      of_host_(tiers.host_memory(), "the engine's host pools"),
      stream_(device, "guard of leases") {}

GuardedView& LeaseGuard::view_of(const LentMemory& memory) {
  return of_device_.contains(memory.data) ? of_device_ : of_host_;
}

LentUse LeaseGuard::lend(LeasedUse& lease) {
  const LentUse lent{.parameters = {.data = lease.parameters,
                                    .size_bytes = layout_.unit_parameter_bytes(lease.unit)},
                     .gradients = {.data = lease.gradients,
                                   .size_bytes = layout_.unit_gradient_bytes(lease.unit),
                                   .access = GuardedView::Access::kWrite}};
  lease.parameters = lend(lent.parameters);
  lease.gradients = lend(lent.gradients);
  return lent;
}

void LeaseGuard::end(const LentUse& use, EventId computed) {
  end(use.parameters, computed);
  end(use.gradients, computed);
}

std::byte* LeaseGuard::lend(const LentMemory& memory) {
  if (memory.data == nullptr) return nullptr;
  return view_of(memory).open(memory.data, memory.size_bytes, memory.access);
}

void LeaseGuard::end(const LentMemory& memory, EventId computed) {
  if (memory.data == nullptr) return;
  device_.wait(stream_.id(), computed);
  device_.notify(stream_.id(), [this, memory] { close(memory); });
}

bool LeaseGuard::end_at_once(const LentUse& use, EventId computed) noexcept {
  if (!has_occurred(computed)) return false;
  close(use.parameters);
  close(use.gradients);
  return true;
}

bool LeaseGuard::end_at_once(const LentMemory& memory, EventId computed) noexcept {
  if (!has_occurred(computed)) return false;
  close(memory);
  return true;
}

// A device that cannot say so ends the access later, and reports its failure there.
bool LeaseGuard::has_occurred(EventId event) const noexcept {
  try {
    return device_.is_complete(event);
  } catch (...) {
    return false;
  }
}

void LeaseGuard::close(const LentMemory& memory) noexcept {
  if (memory.data != nullptr) view_of(memory).close(memory.data, memory.size_bytes, memory.access);
}

void check_guard(const Config& config, const Device& device) {
  if (config.memory.guard == GuardMode::kOn && !can_guard(device))
    throw Error(ErrorCode::kConfig, "memory.guard is \"on\", but the memory of the device \"" +
                                        std::string(device.name()) +
                                        "\" cannot be mapped twice; set it to \"auto\", or compute "
                                        "on the host device");
}

std::unique_ptr<LeaseGuard> make_lease_guard(const Config& config, const Layout& layout,
                                             const Tiers& tiers, Device& device) {
  const GuardMode mode = config.memory.guard;
  const bool is_wanted = mode == GuardMode::kOn || (mode == GuardMode::kAuto && kGuardsByItself);
  if (!is_wanted || !can_guard(device)) return nullptr;
  return std::make_unique<LeaseGuard>(layout, tiers, device);
}

}  // namespace sluice
