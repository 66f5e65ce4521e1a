// One rank of a world of any size, on a host device. The other ranks are imaginary. The other ranks
// add nothing to sums of floating-point values. In gathers, and in reductions of integers, the
// other ranks contribute the same data as this rank, unless a test changes their data.
//
// Thread rule: the same as for Collectives.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/error.h>
#include "gpu/ranks/host_collectives.h"
#include "gpu/ranks/integer_reduction.h"

namespace sluice::test {

// A function of this type changes the data of another rank. At first, `said` holds this rank's data
// or a piece of this data.
using OtherRank =
    std::function<void(std::uint32_t rank, std::string_view subject, std::span<std::byte> said)>;

class ManyRanks final : public HostCollectives {
 public:
  ManyRanks(HostDevice& device, std::uint32_t rank, std::uint32_t rank_count, OtherRank other = {})
      : HostCollectives(device, std::make_shared<RankFailure>(),
                        RankGroup::world(rank, rank_count)),
        other_(std::move(other)) {}

  std::string_view name() const override { return "many"; }
  std::unique_ptr<Collectives> open(std::span<const std::uint32_t> ranks) override {
    const auto own = std::ranges::find(ranks, rank());
    SLUICE_CHECK(own != ranks.end(), "a rank opens groups that it is in");
    return std::make_unique<ManyRanks>(device(), static_cast<std::uint32_t>(own - ranks.begin()),
                                       static_cast<std::uint32_t>(ranks.size()), other_);
  }
  void abort(std::string_view) noexcept override {}

 private:
  // Returns the contribution of `of_rank`. This rank's own contribution begins at `own`, and has
  // `size_bytes` bytes.
  std::vector<std::byte> said_by(std::uint32_t of_rank, std::string_view subject,
                                 const std::byte* own, std::uint64_t size_bytes) const {
    std::vector<std::byte> said(own, own + size_bytes);
    if (of_rank != rank() && other_) other_(of_rank, subject, said);
    return said;
  }

  void run(const AllGather& gather, std::uint64_t) override {
    for (std::uint32_t i = 0; i < rank_count(); ++i) {
      const auto said = said_by(i, gather.subject, gather.source, gather.shard_bytes);
      std::byte* const target = gather.target + i * gather.shard_bytes;
      if (target != gather.source && !said.empty()) std::memcpy(target, said.data(), said.size());
    }
  }
  void run(const AllReduceIntegers& reduce, std::uint64_t) override {
    const std::uint64_t size_bytes = reduce.count() * sizeof(std::uint64_t);
    const std::vector<std::byte> own(reduce.data, reduce.data + size_bytes);
    for (std::uint32_t i = 0; i < rank_count(); ++i) {
      if (i == rank()) continue;
      const auto said = said_by(i, reduce.subject, own.data(), size_bytes);
      combine_integers(reduce, 0, reduce.count(), said.data(), reduce.data);
    }
  }
  void run(const ReduceScatter& reduce, std::uint64_t) override {
    SLUICE_CHECK(reduce.source_type == reduce.target_type, "no groups here");
    const std::uint64_t bytes = reduce.shard_elements * size_of(reduce.source_type);
    const std::byte* const own = reduce.source + rank() * bytes;
    if (own != reduce.target && bytes != 0) std::memcpy(reduce.target, own, bytes);
  }
  void run(const AllReduce&, std::uint64_t) override {}
  void run(const Broadcast&, std::uint64_t) override {}
  void run(const Barrier&, std::uint64_t) override {}

  const OtherRank other_;
};

}  // namespace sluice::test
