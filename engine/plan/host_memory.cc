#include "engine/plan/host_memory.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/topology.h"

namespace sluice {
namespace {

std::uint64_t less(std::uint64_t from, std::uint64_t what) {
  return from - std::min(from, what);
}

// For the engine's threads and tables, and the kernel's page tables of the pools: without it an
// "auto" budget ended at a cgroup's limit to the page, and the kernel killed the process.
constexpr std::uint64_t kSpareBytes = 8_MiB;

// Names a size that can be lowered until everything fits, or says that none can.
std::string remedy(const HostMemory& memory) {
  // The free memory varies a little from one moment to the next.
  const std::uint64_t excess_bytes = memory.sum_bytes() - memory.room_bytes() + 1_MiB;
  if (excess_bytes < memory.host_pool_bytes)
    return fmt::format("lower memory.host to \"{}KiB\" or less",
                       (memory.host_pool_bytes - excess_bytes) / 1_KiB);
  if (excess_bytes < memory.host_pool_bytes + memory.device_pool_bytes)
    return fmt::format("lower memory.host and memory.device, to \"{}KiB\" or less together",
                       (memory.host_pool_bytes + memory.device_pool_bytes - excess_bytes) / 1_KiB);
  return "the application alone is too large: lower what it keeps (for sluice train "
         "batch.sequences or model.context, or set activations to \"recompute\"), or find more "
         "memory";
}

}  // namespace

HostMemory process_memory(bool device_is_host) {
  const MemoryRoom room = memory_room();
  return {.device_is_host = device_is_host,
          .beside_bytes = room.own_bytes + kSpareBytes,
          .beside = "what this process has already, and 8 MiB for threads and tables",
          .room = room};
}

std::optional<std::string> shortage_of(const HostMemory& memory) {
  if (memory.sum_bytes() <= memory.room_bytes()) return std::nullopt;
  const std::string part =
      memory.ranks == 1 ? "" : fmt::format("for each of the {} ranks here ", memory.ranks);
  std::string message =
      fmt::format("the run needs {} of the host's memory, but {} leaves {}{}; {}:",
                  format_bytes(memory.sum_bytes()), memory.room.bound, part,
                  format_bytes(memory.room_bytes()), remedy(memory));
  const auto add = [&](const char* name, std::uint64_t bytes, std::string_view reason) {
    if (bytes != 0)
      message += fmt::format("\n  {:<24} {:>10}  {}", name, format_bytes(bytes), reason);
  };
  add("device pools", memory.device_pool_bytes, "under memory.device, which is the host's here");
  add("host pools", memory.host_pool_bytes, "under memory.host");
  add("the application", memory.beside_bytes, memory.beside);
  return message;
}

void require_room(const HostMemory& memory) {
  if (const auto shortage = shortage_of(memory)) throw Error(ErrorCode::kOutOfMemory, *shortage);
}

std::string settle_shortage(const std::optional<std::string>& shortage, RoomCheck check) {
  if (!shortage || check == RoomCheck::kOff) return {};
  if (check == RoomCheck::kWarn) return *shortage;
  throw Error(ErrorCode::kOutOfMemory,
              *shortage + "\n  memory.check \"warn\" goes on without that memory");
}

Config::Memory with_budgets(Config::Memory memory, const HostMemory& host) {
  const std::uint64_t machine_bytes = topology().memory_bytes / host.ranks;
  const std::uint64_t share_bytes = less(host.room_bytes(), host.beside_bytes);
  if (!memory.device_bytes && host.device_is_host)
    memory.device_bytes = std::min(default_device_bytes(machine_bytes), share_bytes / 2);
  const std::uint64_t taken_bytes = host.device_is_host ? *memory.device_bytes : 0;
  if (!memory.host_bytes)
    memory.host_bytes = std::min(default_host_bytes(machine_bytes), less(share_bytes, taken_bytes));
  return memory;
}

}  // namespace sluice
