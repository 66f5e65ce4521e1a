// Gives leases addresses at which their memory is accessible only while it is lent
// (base/guarded_view.h). If the application uses memory after the lease on it has ended, or writes
// parameters, the process ends with SIGSEGV there. Without the guard, it would read the bytes of
// another unit, or change them. The guard works on the host device alone, whose memory it can map a
// second time.
//
// Thread rule: lend() on the application's thread, end() on the scheduler's thread.
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

// Bytes that a lease lends, at the address that the engine uses.
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
  // The memory of `tiers` gets new pages, so nothing may be in it. All arguments must outlive the
  // guard.
  // Fails with kOutOfMemory if the kernel refuses a mapping.
  LeaseGuard(const Layout& layout, const Tiers& tiers, Device& device);

  // Gives `lease` the addresses at which the application has access, until end(): it may read
  // parameters, and read and write gradients.
  LentUse lend(LeasedUse& lease);
  void end(const LentUse& use, EventId computed);

  // Returns the address at which the application has access, until end().
  // Requires: nothing is lent (the address is then null), or the bytes lie in memory of `tiers`.
  std::byte* lend(const LentMemory& memory);
  // Ends the access when `computed` has occurred.
  void end(const LentMemory& memory, EventId computed);

 private:
  GuardedView& view_of(const LentMemory& memory);

  const Layout& layout_;
  Device& device_;
  GuardedView of_device_;
  GuardedView of_host_;
  Stream stream_;  // last member, because its callbacks use all others
};

// Fails with kConfig if memory.guard is "on" and `device` is not the host device.
void check_guard(const Config& config, const Device& device);
// Returns the guard that `config` asks for, or null. With memory.guard "auto", only builds without
// NDEBUG have a guard, on the host device.
// Fails like the guard's constructor. Requires: check_guard() has passed.
std::unique_ptr<LeaseGuard> make_lease_guard(const Config& config, const Layout& layout,
                                             const Tiers& tiers, Device& device);

}  // namespace sluice
