#include "gpu/device/memory_ledger.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {
namespace {

std::string refusal(const MemoryLedger& ledger, std::uint64_t size_bytes) {
  try {
    ledger.check_fits(size_bytes, "the request");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    return error.what();
  }
  return "";
}

TEST(MemoryLedger, ListsWhatIsTakenByPurposeLargestFirst) {
  std::array<std::byte, 4> memory{};
  MemoryLedger ledger(16_MiB);
  ledger.add(&memory[0], 1_MiB, "slots");
  ledger.add(&memory[1], 5_MiB, "window");
  ledger.add(&memory[2], 2_MiB, "slots");
  EXPECT_EQ(refusal(ledger, 8_MiB), "");
  EXPECT_EQ(refusal(ledger, 8_MiB + 1),
            "device memory cannot hold 8.00 MiB (8388609 B) more for the request: 8.00 MiB of 16.0 "
            "MiB (8388608 of 16777216 B) are taken by\n"
            "    5.00 MiB  window\n"
            "    3.00 MiB  slots (2 allocations)\n"
            "; keep less there, or give the device more memory, where memory.device or "
            "HostDeviceOptions::memory_bytes limits it");
}

// Taken and request would wrap around to almost nothing.
TEST(MemoryLedger, RefusesWhatWouldOverflow) {
  const std::byte memory{};
  MemoryLedger ledger(16_MiB);
  ledger.add(&memory, 2_MiB, "slots");
  EXPECT_NE(refusal(ledger, ~std::uint64_t{0}), "");
  EXPECT_NE(refusal(ledger, ~std::uint64_t{0} - 1_MiB), "");
}

TEST(MemoryLedger, EmptyLedgerListsNothing) {
  EXPECT_NE(refusal(MemoryLedger(0), 1).find("0 B of 0 B (0 of 0 B) are taken; keep"),
            std::string::npos);
}

TEST(MemoryLedger, RemovedMemoryIsForgotten) {
  std::array<std::byte, 2> memory{};
  MemoryLedger ledger(10);
  ledger.add(&memory[0], 10, "first");
  ledger.remove(&memory[0]);
  EXPECT_EQ(ledger.taken_bytes(), 0u);
  ledger.add(&memory[0], 7, "second");
  EXPECT_EQ(ledger.taken_bytes(), 7u);
  EXPECT_EQ(refusal(ledger, 4).find("first"), std::string::npos);
}

TEST(MemoryLedgerDeathTest, RefusesUnknownMemory) {
  std::array<std::byte, 1> memory{};
  MemoryLedger ledger(10);
  EXPECT_DEATH(ledger.remove(memory.data()), "what allocate");
}

}  // namespace
}  // namespace sluice
