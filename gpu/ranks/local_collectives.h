// Collectives between threads of one process, each with a host device of its own: the plain
// version, and the oracle of the others. Every rank reads the others' memory where it lies.
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

  // What rank `rank` uses; once for each rank. `device` must outlive it, and so must the world.
  std::unique_ptr<Collectives> join(std::uint32_t rank, HostDevice& device);

  class Meetings;  // where the operations of the ranks come together

 private:
  std::uint32_t rank_count_;
  std::shared_ptr<Meetings> meetings_;
};

}  // namespace sluice
