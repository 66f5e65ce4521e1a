#include "gpu/ranks/two_level_collectives.h"

#include <vector>

#include <sluice/error.h>

namespace sluice {
namespace {

std::vector<std::uint32_t> ranks_from(std::uint32_t first, std::uint32_t count,
                                      std::uint32_t step) {
  std::vector<std::uint32_t> ranks(count);
  for (std::uint32_t i = 0; i < count; ++i) ranks[i] = first + i * step;
  return ranks;
}

}  // namespace

TwoLevelCollectives::TwoLevelCollectives(Collectives& whole, std::uint32_t node_ranks,
                                         Device& device)
    : whole_(whole), device_(device) {
  const std::uint32_t count = whole.rank_count();
  SLUICE_CHECK(node_ranks != 0 && count % node_ranks == 0, "nodes are equally large");
  const std::uint32_t place = whole.rank() % node_ranks;
  node_ = whole.open(ranks_from(whole.rank() - place, node_ranks, 1));
  across_ = whole.open(ranks_from(place, count / node_ranks, node_ranks));
}

void TwoLevelCollectives::all_gather(const AllGather& gather, StreamId stream) {
  gather_through(shards_, gather, stream);
}

// The shards of this rank's peers are gathered in `shards`, and each is completed within the node.
void TwoLevelCollectives::gather_through(std::span<std::byte> shards, const AllGather& gather,
                                         StreamId stream) {
  const std::uint64_t shard = gather.shard_bytes;
  if (shard == 0) return;
  const std::uint64_t node_bytes = node_->rank_count() * shard;
  SLUICE_CHECK(node_count() * shard <= shards.size(), "there is room for the peers' shards");
  std::byte* const own = shards.data() + across_->rank() * shard;
  device_.copy(own, gather.source, shard, stream);
  across_->all_gather(
      {.target = shards.data(), .source = own, .shard_bytes = shard, .subject = gather.subject},
      stream);
  for (std::uint32_t node = 0; node < node_count(); ++node) {
    const bool is_own = node == across_->rank();
    node_->all_gather({.target = gather.target + node * node_bytes,
                       .source = is_own ? gather.source : shards.data() + node * shard,
                       .shard_bytes = shard,
                       .subject = gather.subject},
                      stream);
  }
}

void TwoLevelCollectives::reduce_scatter(const ReduceScatter& reduce, StreamId stream) {
  const std::uint64_t shard = reduce.shard_elements;
  if (shard == 0) return;
  const std::uint64_t node_bytes = node_->rank_count() * shard * size_of(reduce.source_type);
  const std::uint32_t nodes = node_count();
  SLUICE_CHECK(nodes * shard * sizeof(float) <= sums_.size(), "there is room for a node's sums");
  for (std::uint32_t node = 0; node < nodes; ++node)
    node_->reduce_scatter({.target = sums_.data() + node * shard * sizeof(float),
                           .target_type = DType::kFp32,
                           .source = reduce.source + node * node_bytes,
                           .source_type = reduce.source_type,
                           .shard_elements = shard,
                           .subject = reduce.subject},
                          stream);
  across_->reduce_scatter({.target = reduce.target,
                           .target_type = reduce.target_type,
                           .source = sums_.data(),
                           .source_type = DType::kFp32,
                           .shard_elements = shard,
                           .subject = reduce.subject},
                          stream);
}

void TwoLevelCollectives::all_reduce(const AllReduce& reduce, StreamId stream) {
  SLUICE_CHECK(reduce.element_count % rank_count() == 0, "every rank adds an equal part");
  const std::uint64_t shard = reduce.element_count / rank_count();
  const std::uint64_t shard_bytes = shard * size_of(reduce.type);
  std::byte* const own = reduce.data + rank() * shard_bytes;
  reduce_scatter({.target = own,
                  .target_type = reduce.type,
                  .source = reduce.data,
                  .source_type = reduce.type,
                  .shard_elements = shard,
                  .subject = reduce.subject},
                 stream);
  // The sums have been read when the gather begins.
  gather_through(
      sums_,
      {.target = reduce.data, .source = own, .shard_bytes = shard_bytes, .subject = reduce.subject},
      stream);
}

// Sums and minima of integers do not depend on the order.
void TwoLevelCollectives::all_reduce_integers(const AllReduceIntegers& reduce, StreamId stream) {
  node_->all_reduce_integers(reduce, stream);
  across_->all_reduce_integers(reduce, stream);
}

// The root's peers bring the data to their nodes.
void TwoLevelCollectives::broadcast(const Broadcast& broadcast, StreamId stream) {
  SLUICE_CHECK(broadcast.root < rank_count(), "the root is one of the ranks");
  Broadcast of_level = broadcast;
  const std::uint32_t place = broadcast.root % node_->rank_count();
  of_level.root = broadcast.root / node_->rank_count();
  if (node_->rank() == place) across_->broadcast(of_level, stream);
  of_level.root = place;
  node_->broadcast(of_level, stream);
}

// The second barrier ends after every node has passed the first.
void TwoLevelCollectives::barrier(std::string_view subject, StreamId stream) {
  node_->barrier(subject, stream);
  across_->barrier(subject, stream);
}

void TwoLevelCollectives::use_memory(std::span<std::byte> memory) {
  node_->use_memory(memory);
  across_->use_memory(memory);
}

void TwoLevelCollectives::forget_memory() noexcept {
  node_->forget_memory();
  across_->forget_memory();
}

std::vector<std::string> TwoLevelCollectives::notes() const {
  std::vector<std::string> all = node_->notes();
  for (std::string& note : across_->notes()) all.push_back(std::move(note));
  return all;
}

}  // namespace sluice
