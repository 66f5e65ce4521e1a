// Collectives between threads of one process, each with its own host device: the plain version, and
// the oracle for the others. Every rank reads the others' memory directly.
//
// Thread rule: a LocalWorld from any thread; the collectives of a rank as Collectives.
#pragma once

#include <memory>

#include "gpu/ranks/host_collectives.h"

namespace sluice {

class LocalWorld {
 public:
  LocalWorld(std::uint32_t rank_count, const HostCollectivesOptions& options);
  ~LocalWorld();

  // Makes the collectives of rank `rank`; once per rank. `device` and this world must outlive them.
  std::unique_ptr<Collectives> join(std::uint32_t rank, HostDevice& device);

  class Meetings;  // where the ranks' operations meet

 private:
  std::uint32_t rank_count_;
  std::shared_ptr<Meetings> meetings_;
};

}  // namespace sluice
