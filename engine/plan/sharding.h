// The part of the state that each of several ranks keeps. The ZeRO stages and groups are settings
// of one mechanism, the layout's Shard. Pure.
#pragma once

#include <cstdint>

#include <sluice/config.h>
#include "engine/plan/layout.h"

namespace sluice {

// The number of consecutive ranks, of `count`, that share a copy of the state.
// Requires: group_ranks of `sharding` has been set by the code that knows the hosts.
// Fails with kConfig if the group does not divide the ranks.
std::uint32_t group_size(const Config::Sharding& sharding, std::uint32_t count);

// The number of consecutive ranks that add up their gradients and gather parameters among
// themselves first. The first level consists of the ranks of a group, or of a node
// (sharding.reduction "nodes"); 1 = there is one level, with all ranks. Requires: the same as
// group_size(), and also node_ranks.
// Fails with kConfig if the nodes do not divide the ranks, and for nodes together with groups.
std::uint32_t first_level_ranks(const Config::Sharding& sharding, std::uint32_t count);

// The part that rank `rank` of `count` keeps. The call has the same requirements as group_size(),
// and fails in the same cases.
Shard shard_of(const Config::Sharding& sharding, std::uint32_t rank, std::uint32_t count);

// Whether ranks add up the gradient of every use, and not only each unit's sum over a step. Stages
// with sharded gradients always add up every use's gradient. With one micro-batch or in vertical
// order, other stages also add up every use's gradient, because all stages give the same bits in
// these cases. Otherwise these stages communicate once per step.
bool reduces_each_use(const Shard& shard, std::uint32_t micro_batches, MicroBatchOrder order);

// The device memory that each of `count` ranks needs beside the pools. If ranks add in two levels,
// fp32 elements hold a unit's part of a gradient between the levels. Ranks also need bytes to
// exchange values that all ranks have to know.
std::uint64_t partial_sum_elements(const Config::Sharding& sharding, std::uint32_t count,
                                   const Layout& layout);
// The bytes that one sequence of gathers in nodes needs to receive the parts of other nodes. The
// function gather_buffer_count() returns the number of such sequences.
std::uint64_t gather_buffer_bytes(const Config::Sharding& sharding, std::uint32_t count,
                                  const Layout& layout);
std::uint32_t gather_buffer_count(const Layout& layout);
std::uint64_t vote_buffer_bytes(std::uint32_t count);
std::uint64_t rank_buffer_bytes(const Config::Sharding& sharding, std::uint32_t count,
                                const Layout& layout);

// Fails with kConfig if the stage does not support these homes with several ranks.
void check_homes(const Config::Sharding& sharding, std::uint32_t count,
                 const Config::Placement& choices);

}  // namespace sluice
