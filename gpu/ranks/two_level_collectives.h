// Collectives in two levels. One level connects the ranks of a node. The other level connects the
// ranks that have the same place in their nodes. With two levels, the network between nodes carries
// each gathered byte once per node instead of once per rank. A rank exchanges messages with only
// one rank of each other node.
//
// With two levels, floating-point values are added in another order than with one level. So the
// bits of the sums may differ between two levels and one level. First, the values of each node's
// ranks are added in rank order. Then the results of the nodes are added in the order of the nodes.
// All additions are in fp32, with one rounding at the end.
//
// Thread rule: the same as for Collectives.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include <sluice/collectives.h>

namespace sluice {

class TwoLevelCollectives final : public Collectives {
 public:
  // Each node consists of `node_ranks` consecutive ranks of `whole`. Every rank of `whole` makes
  // the same calls. `whole` and `device` must outlive the object.
  // Requires: node_ranks divides the number of ranks.
  TwoLevelCollectives(Collectives& whole, std::uint32_t node_ranks, Device& device);

  // The call sets the device memory for the sums of this rank's node. This memory must outlive the
  // last reduction. Requires: `memory` has 4 / node_ranks bytes for each element in the source of
  // the longest reduction.
  void use_for_sums(std::span<std::byte> memory) { sums_ = memory; }
  // The call sets the device memory for the shards that this rank passes on to the other ranks of
  // its node. This memory must live as long as the memory for sums. A gather never changes this
  // rank's own part of the target. So other ranks may read this rank's own part of the target
  // during the gather. Requires: the target of the longest gather is node_ranks times as large as
  // `memory`.
  void use_for_gathers(std::span<std::byte> memory) { shards_ = memory; }

  std::string_view name() const override { return whole_.name(); }
  std::uint32_t rank() const override { return whole_.rank(); }
  std::uint32_t rank_count() const override { return whole_.rank_count(); }
  const Device* memory_device() const override { return whole_.memory_device(); }

  void all_gather(const AllGather& gather, StreamId stream) override;
  void reduce_scatter(const ReduceScatter& reduce, StreamId stream) override;
  // The call uses the memory that use_for_sums() has set. Requires: the number of elements is a
  // multiple of the number of ranks.
  void all_reduce(const AllReduce& reduce, StreamId stream) override;
  void all_reduce_integers(const AllReduceIntegers& reduce, StreamId stream) override;
  void broadcast(const Broadcast& broadcast, StreamId stream) override;
  void barrier(std::string_view subject, StreamId stream) override;

  std::unique_ptr<Collectives> open(std::span<const std::uint32_t> ranks) override {
    return whole_.open(ranks);
  }
  bool may_block() const override { return whole_.may_block(); }
  void hand_over(std::function<void()> work) override { whole_.hand_over(std::move(work)); }
  void prepare_reductions() override {
    node_->prepare_reductions();
    across_->prepare_reductions();
  }
  void use_memory(std::span<std::byte> memory) override;
  void forget_memory() noexcept override;
  std::vector<std::string> notes() const override;
  void on_failure(std::function<void(const Error&)> handler) override {
    whole_.on_failure(std::move(handler));
  }
  void abort(std::string_view reason) noexcept override { whole_.abort(reason); }

 private:
  std::uint32_t node_count() const { return across_->rank_count(); }
  void gather_through(std::span<std::byte> shards, const AllGather& gather, StreamId stream);

  // Constant after construction.
  Collectives& whole_;  // used only to open sequences
  Device& device_;
  std::unique_ptr<Collectives> node_;    // the ranks of this rank's node
  std::unique_ptr<Collectives> across_;  // this rank's peers, one per node

  std::span<std::byte> sums_;
  std::span<std::byte> shards_;
};

}  // namespace sluice
