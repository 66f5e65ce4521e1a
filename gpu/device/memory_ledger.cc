#include "gpu/device/memory_ledger.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>

namespace sluice {

void MemoryLedger::check_fits(std::uint64_t size_bytes, std::string_view purpose) const {
  if (size_bytes > capacity_bytes_ - taken_bytes_) throw refusal(size_bytes, purpose, "");
}

Error MemoryLedger::refusal(std::uint64_t size_bytes, std::string_view purpose,
                            std::string_view why) const {
  return {ErrorCode::kOutOfMemory,
          fmt::format(
              "device memory cannot hold {} ({} B) more for {}: {}{}{} of {} ({} of {} B) "
              "are taken{}; keep less there, or give the device more memory, where memory.device "
              "or HostDeviceOptions::memory_bytes limits it",
              format_bytes(size_bytes), size_bytes, purpose, why, why.empty() ? "" : "; ",
              format_bytes(taken_bytes_), format_bytes(capacity_bytes_), taken_bytes_,
              capacity_bytes_, describe_taken())};
}

void MemoryLedger::add(const std::byte* memory, std::uint64_t size_bytes,
                       std::string_view purpose) {
  SLUICE_CHECK(size_bytes <= capacity_bytes_ - taken_bytes_, "check_fits() comes before add()");
  const bool is_new = entries_.try_emplace(memory, Entry{size_bytes, std::string(purpose)}).second;
  SLUICE_CHECK(is_new, "the memory is already in the ledger");
  taken_bytes_ += size_bytes;
}

void MemoryLedger::remove(const std::byte* memory) {
  const auto entry = entries_.find(memory);
  SLUICE_CHECK(entry != entries_.end(), "free() takes what allocate() of this device gave, once");
  taken_bytes_ -= entry->second.size_bytes;
  entries_.erase(entry);
}

// "\n    2.00 MiB  optimizer lanes (2 allocations)": one line per purpose, the largest first.
std::string MemoryLedger::describe_taken() const {
  struct Sum {
    std::uint64_t size_bytes = 0;
    std::uint64_t count = 0;
  };
  std::map<std::string, Sum> by_purpose;
  for (const auto& [memory, entry] : entries_) {
    Sum& sum = by_purpose[entry.purpose];
    sum.size_bytes += entry.size_bytes;
    ++sum.count;
  }
  std::vector<std::pair<std::string, Sum>> sorted(by_purpose.begin(), by_purpose.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.second.size_bytes > b.second.size_bytes;
  });
  std::string text = sorted.empty() ? "" : " by";
  for (const auto& [purpose, sum] : sorted) {
    text += fmt::format("\n  {:>10}  {}", format_bytes(sum.size_bytes), purpose);
    if (sum.count > 1) text += fmt::format(" ({} allocations)", sum.count);
  }
  if (!sorted.empty()) text += '\n';
  return text;
}

}  // namespace sluice
