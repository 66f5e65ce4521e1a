#include "engine/ranks/pool_check.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>

#include <fmt/format.h>

#include <sluice/units.h>

namespace sluice {
namespace {

// Returns a message if the device has its own memory and too little of it is free.
std::optional<std::string> device_shortage(const Placement& placement, const Device& device) {
  const std::uint64_t needed_bytes = placement.device_slab_bytes();
  const std::uint64_t free_bytes = device.free_bytes();
  if (!device.has_own_memory() || needed_bytes <= free_bytes) return std::nullopt;
  std::string message = fmt::format(
      "the run needs {} of {}, which has {} free; lower memory.device to \"{}KiB\" or less, or "
      "stop other programs that use it:",
      format_bytes(needed_bytes), device.name(), format_bytes(free_bytes),
      (free_bytes + placement.rank_buffer_bytes) / 1_KiB);
  for (const Pool& pool : placement.pools())
    if (pool.tier == Tier::kDevice)
      message += fmt::format("\n  {:<24} {:>10}  {}", pool.name, format_bytes(pool.size_bytes),
                             pool.reason);
  return message;
}

}  // namespace

HostMemory host_of(const Device& device, Ranks& ranks) {
  HostMemory host = process_memory(!device.has_own_memory());
  if (!ranks.are_several()) return host;
  struct Word {
    std::uint64_t id = 0;
    std::uint64_t free_bytes = 0;
  };
  const Word own{host.room.id, host.room.size_bytes - host.room.own_bytes};
  const std::vector<std::byte> all =
      ranks.exchange(std::as_bytes(std::span(&own, 1)), "the free memory");
  std::vector<Word> words(ranks.count());
  std::memcpy(words.data(), all.data(), all.size());
  std::uint64_t free_bytes = own.free_bytes;
  host.ranks = 0;
  for (const Word& word : words) {
    if (word.id != own.id) continue;
    ++host.ranks;
    free_bytes = std::min(free_bytes, word.free_bytes);
  }
  host.room.size_bytes = free_bytes + host.ranks * host.room.own_bytes;
  return host;
}

std::vector<std::string> check_pools(RoomCheck check, const Placement& placement, HostMemory host,
                                     const Device& device, Ranks& ranks) {
  std::vector<std::string> notes;
  host.device_pool_bytes = host.device_is_host ? placement.device_bytes() : 0;
  host.host_pool_bytes = placement.host_bytes();
  ranks.together("the check of the pools", [&] {
    for (const auto& shortage : {shortage_of(host), device_shortage(placement, device)})
      if (std::string note = settle_shortage(shortage, check); !note.empty())
        notes.push_back(std::move(note));
  });
  return notes;
}

}  // namespace sluice
