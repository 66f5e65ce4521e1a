#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <sluice/error.h>
#include <sluice/rank_world.h>
#include <sluice/units.h>
#include "engine/ranks/vote_buffers.h"

namespace sluice {
namespace {

// A function object has to be copyable, buffer and stream are not.
class GroupSum {
 public:
  GroupSum(Collectives& members, Device& device)
      : members_(members),
        words_(device, 4_KiB, "words of the norm group"),
        stream_(device, "norm group") {}

  void add(std::span<std::uint64_t> sums) {
    words_.put(std::as_bytes(sums), 0, stream_.id());
    members_.all_reduce_integers({.data = words_.on_device(),
                                  .sum_count = sums.size(),
                                  .subject = "the norm of the norm group"},
                                 stream_.id());
    words_.get(std::as_writable_bytes(sums), stream_.id());
  }

 private:
  Collectives& members_;
  VoteBuffers words_;
  Stream stream_;
};

}  // namespace

std::unique_ptr<Collectives> split_ranks(Collectives& whole, Device& device, std::uint32_t color) {
  const std::uint32_t count = whole.rank_count();
  VoteBuffers buffers(device, align_up(count * sizeof color, 4_KiB), "colors of the ranks");
  const Stream stream(device, "colors");
  const std::uint64_t offset_bytes = whole.rank() * sizeof color;
  buffers.put(std::as_bytes(std::span(&color, 1)), offset_bytes, stream.id());
  whole.all_gather({.target = buffers.on_device(),
                    .source = buffers.on_device() + offset_bytes,
                    .shard_bytes = sizeof color,
                    .subject = "the colors of the ranks' parts"},
                   stream.id());
  std::vector<std::uint32_t> colors(count);
  buffers.get(std::as_writable_bytes(std::span(colors)), stream.id());
  std::vector<std::uint32_t> members;
  for (std::uint32_t rank = 0; rank < count; ++rank)
    if (colors[rank] == color) members.push_back(rank);
  return whole.open(members);
}

NormGroup norm_group_over(Collectives& members, Device& device,
                          std::vector<TensorId> counted_elsewhere) {
  const auto sum = std::make_shared<GroupSum>(members, device);
  return {.add = [sum](std::span<std::uint64_t> sums) { sum->add(sums); },
          .counted_elsewhere = std::move(counted_elsewhere)};
}

}  // namespace sluice
