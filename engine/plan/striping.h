// The functions spread the blocks over the storage paths. Whole blocks are dealt out in proportion
// to the paths' weights. So drives of unequal speed finish a pass at the same time. Consecutive
// blocks are in flight at the same time. So every group of consecutive blocks is spread in the same
// proportion, too. The functions read the calibration file, and are otherwise pure. Any thread may
// call them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <sluice/config.h>
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"

namespace sluice {

// Returns one weight per path of storage.paths. The config may give the weights. If the config has
// no weights, the weights are the measured rates in the calibration that `sluice bench io --json`
// wrote. These rates were measured with the optimizer's access pattern. Without a calibration, the
// weights are equal.
// Fails with kInput if the calibration cannot be read, is of another machine, or lacks a path.
std::vector<double> storage_weights(const Config::Storage& storage);

// The dealer chooses a drive for each piece of storage. Every drive has a share of all bytes. Each
// piece goes to the drive that is furthest behind its share.
//
//   Example: with weights {3, 1} and equal pieces, the drives are 0 0 1 0, 0 0 1 0, ...
class DriveDealer {
 public:
  // Requires: positive weights.
  explicit DriveDealer(std::span<const double> weights);

  std::uint32_t deal(std::uint64_t size_bytes);
  const std::vector<std::uint64_t>& drive_bytes() const { return drive_bytes_; }

 private:
  std::vector<double> shares_;
  std::vector<std::uint64_t> drive_bytes_;  // so far
  std::uint64_t dealt_bytes_ = 0;
};

struct Striping {
  std::vector<std::uint32_t> drive;        // by block
  std::vector<std::uint64_t> drive_bytes;  // by drive: the bytes of its blocks on storage
};

// Deals the blocks out to the drives.
Striping plan_striping(const Layout& layout, const Placement& placement,
                       std::span<const double> weights);

}  // namespace sluice
