// Collectives between threads of one process. Each thread has its own host device. These
// collectives are the plain version of Collectives, and the oracle in tests of the other versions.
// Every rank reads the other ranks' memory directly.
//
// Thread rule: any thread may use a LocalWorld. The collectives of a rank follow the thread rule of
// Collectives.
#pragma once

#include <memory>

#include "gpu/ranks/host_collectives.h"

namespace sluice {

class LocalWorld {
 public:
  LocalWorld(std::uint32_t rank_count, const HostCollectivesOptions& options);
  ~LocalWorld();

  // Makes the collectives of rank `rank`. The function is called once per rank. `device` and this
  // world must outlive the collectives.
  std::unique_ptr<Collectives> join(std::uint32_t rank, HostDevice& device);

  class Meetings;  // where the ranks' operations meet

 private:
  std::uint32_t rank_count_;
  std::shared_ptr<Meetings> meetings_;
};

}  // namespace sluice
