#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <sluice/error.h>
#include <sluice/rank_world.h>
#include <sluice/units.h>

namespace sluice {
namespace {

// A function object has to be copyable, buffer and stream are not.
class GroupSum {
 public:
  GroupSum(Collectives& members, Device& device)
      : members_(members),
        device_(device),
        words_(device, 4_KiB, "words of the norm group"),
        stream_(device, "norm group") {}

  void add(std::span<std::uint64_t> sums) {
    SLUICE_CHECK(sums.size_bytes() <= words_.size_bytes(), "a norm has few words");
    const auto bytes = std::as_writable_bytes(sums);
    device_.copy(words_.data(), bytes.data(), bytes.size(), stream_.id());
    members_.all_reduce_integers(
        {.data = words_.data(), .sum_count = sums.size(), .subject = "the norm of the norm group"},
        stream_.id());
    device_.copy(bytes.data(), words_.data(), bytes.size(), stream_.id());
    device_.synchronize(stream_.id());
  }

 private:
  Collectives& members_;
  Device& device_;
  DeviceBuffer words_;
  Stream stream_;
};

}  // namespace

std::unique_ptr<Collectives> split_ranks(Collectives& whole, Device& device, std::uint32_t color) {
  const std::uint32_t count = whole.rank_count();
  const DeviceBuffer buffer(device, count * sizeof color, "colors of the ranks");
  const Stream stream(device, "colors");
  std::byte* const own = buffer.data() + whole.rank() * sizeof color;
  device.copy(own, reinterpret_cast<const std::byte*>(&color), sizeof color, stream.id());
  whole.all_gather({.target = buffer.data(),
                    .source = own,
                    .shard_bytes = sizeof color,
                    .subject = "the colors of the ranks' parts"},
                   stream.id());
  std::vector<std::uint32_t> colors(count);
  device.copy(reinterpret_cast<std::byte*>(colors.data()), buffer.data(), buffer.size_bytes(),
              stream.id());
  device.synchronize(stream.id());
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
