// These functions compute the part of the state that each rank keeps if there are several ranks.
// One mechanism, the layout's Shard, implements both the ZeRO stages and the groups. The functions
// are pure.
#pragma once

#include <cstdint>

#include <sluice/config.h>
#include "engine/plan/layout.h"

namespace sluice {

// Fails with kConfig if several ranks have sharding.group "node" where no code knows the hosts, as
// in a tool that makes the files of a run.
void require_group_number(const Config::Sharding& sharding, std::uint32_t count);

// The size of a group. A group consists of consecutive ranks that share one copy of the state.
// `count` is the number of all ranks.
// Requires: `sharding.group_ranks` has been set. The code that knows the hosts sets this number.
// Fails with kConfig if `count` is not a multiple of the group's size.
std::uint32_t group_size(const Config::Sharding& sharding, std::uint32_t count);

// The number of ranks in the first level. The ranks of the first level are consecutive. These ranks
// first add up gradients and gather parameters among themselves. The first level is a group. With
// sharding.reduction "nodes", the first level is a node. A result of 1 means that all ranks are in
// one level. The requirements are the same as for group_size(). In addition, `sharding.node_ranks`
// must be set.
// Fails with kConfig if `count` is not a multiple of `sharding.node_ranks`, or if nodes are
// combined with groups.
std::uint32_t first_level_ranks(const Config::Sharding& sharding, std::uint32_t count);

// Returns the part of the state that one of `count` ranks keeps. `rank` is the number of this rank.
// The requirements are the same as for group_size(). The call fails in the same cases as
// group_size().
Shard shard_of(const Config::Sharding& sharding, std::uint32_t rank, std::uint32_t count);

// Returns whether ranks add up gradients after every use. If gradients are sharded, ranks always
// add up the gradient of every use. With one micro-batch, or in vertical order, ranks also add up
// the gradient of every use. If the gradient of every use is added up, all ZeRO stages give the
// same bits. In all other cases, each rank first sums a unit's gradients itself, and the ranks add
// up these sums once per step.
bool reduces_each_use(const Shard& shard, std::uint32_t micro_batches, MicroBatchOrder order);

// The device memory that each of `count` ranks needs in addition to the pools.
// partial_sum_elements() returns a number of fp32 elements. If ranks add in two levels, these
// elements hold the sum of the first level. vote_buffer_bytes() returns the size of the buffer for
// values that the ranks exchange.
std::uint64_t partial_sum_elements(const Config::Sharding& sharding, std::uint32_t count,
                                   const Layout& layout);
// The size of the buffer in which one sequence of gathers receives the parts of other nodes.
// gather_buffer_count() returns the number of such sequences.
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
