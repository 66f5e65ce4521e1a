// A lease lends memory, and the guard gives this memory other addresses. At the guard's addresses,
// the memory is accessible only until the lease ends (base/guarded_view.h). The process ends with
// SIGSEGV if the application uses the memory after the end of the lease, or if the application
// writes parameters. Without the guard, an access after the end of the lease could read or change
// the bytes of another unit. The guard works only on the host device, because only this device's
// memory can be mapped a second time.
//
// Thread rule: the application's thread calls lend() and end_at_once(), and the scheduler's thread
// calls end().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include <sluice/config.h>
#include <sluice/device.h>
#include <sluice/use.h>
#include "base/guarded_view.h"
#include "engine/plan/layout.h"
#include "engine/store/tiers.h"

namespace sluice {

// The memory that a lease lends. `data` is the address that the engine itself uses for this memory.
struct LentMemory {
  const std::byte* data = nullptr;  // null: nothing is lent
  std::uint64_t size_bytes = 0;
  GuardedView::Access access = GuardedView::Access::kRead;
};

struct LentUse {
  LentMemory parameters = {};
  LentMemory gradients = {};
};

class LeaseGuard {
 public:
  // The constructor replaces the pages of the memory in `tiers`. So this memory must not contain
  // any data yet. All arguments must outlive the guard.
  // Fails with kOutOfMemory if the kernel refuses a mapping.
  LeaseGuard(const Layout& layout, const Tiers& tiers, Device& device);

  // Replaces the addresses in `lease`. The application has access to the new addresses until end()
  // is called. The application may read parameters, and may read and write gradients.
  LentUse lend(LeasedUse& lease);
  void end(const LentUse& use, EventId computed);
  // If the event `computed` has occurred already, ends the application's access before the call
  // returns. Otherwise does nothing and returns false.
  bool end_at_once(const LentUse& use, EventId computed) noexcept;

  // Returns an address. Until end(), the application has access to the lent memory at this address.
  // If nothing is lent, the address is null.
  // Requires: the lent memory is a part of the memory of `tiers`.
  std::byte* lend(const LentMemory& memory);
  // Ends the application's access when the event `computed` has occurred.
  void end(const LentMemory& memory, EventId computed);
  bool end_at_once(const LentMemory& memory, EventId computed) noexcept;

 private:
  GuardedView& view_of(const LentMemory& memory);
  bool has_occurred(EventId event) const noexcept;
  void close(const LentMemory& memory) noexcept;

  const Layout& layout_;
  Device& device_;
  GuardedView of_device_;
  GuardedView of_host_;
  Stream stream_;  // last member, because its callbacks use all others
};

// Fails with kConfig if memory.guard is "on" and `device` is not the host device.
void check_guard(const Config& config, const Device& device);
// Returns the guard that `config` asks for. The result is null if there is no guard. With
// memory.guard "auto", there is a guard only in builds without NDEBUG, and only on the host device.
// Fails in the same cases as the guard's constructor. Requires: check_guard() has passed.
std::unique_ptr<LeaseGuard> make_lease_guard(const Config& config, const Layout& layout,
                                             const Tiers& tiers, Device& device);

}  // namespace sluice
