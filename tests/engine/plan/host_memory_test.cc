#include "engine/plan/host_memory.h"

#include <gtest/gtest.h>

#include <sluice/units.h>
#include "base/topology.h"
#include "tests/support/expect_error.h"

namespace sluice {
namespace {

using test::expect_error;

HostMemory of(std::uint64_t device_pool_bytes, std::uint64_t host_pool_bytes,
              std::uint64_t beside_bytes, std::uint64_t room_bytes, std::uint32_t ranks = 1) {
  return {.device_pool_bytes = device_pool_bytes,
          .host_pool_bytes = host_pool_bytes,
          .beside_bytes = beside_bytes,
          .ranks = ranks,
          .room = {.size_bytes = room_bytes, .bound = "the cgroup's limit of 200 MiB"}};
}

TEST(HostMemoryTest, TheSumMayBeAllThatThereIs) {
  EXPECT_NO_THROW(require_room(of(40_MiB, 96_MiB, 64_MiB, 200_MiB)));
  const std::string message = expect_error(
      ErrorCode::kOutOfMemory, [] { require_room(of(40_MiB, 96_MiB, 64_MiB, 200_MiB - 1)); });
  for (const char* const part :
       {"needs 200 MiB", "the cgroup's limit of 200 MiB leaves", "device pools", "40.0 MiB",
        "host pools", "96.0 MiB", "the application", "64.0 MiB"})
    EXPECT_NE(message.find(part), std::string::npos) << part << " in " << message;
}

TEST(HostMemoryTest, SaysWhatToLowerAndHowFar) {
  const auto message_of = [](const HostMemory& memory) {
    return expect_error(ErrorCode::kOutOfMemory, [&] { require_room(memory); });
  };
  const std::string host = message_of(of(40_MiB, 200_MiB, 64_MiB, 200_MiB));
  EXPECT_NE(host.find("lower memory.host to \"97280KiB\""), std::string::npos) << host;
  const std::string both = message_of(of(150_MiB, 20_MiB, 64_MiB, 200_MiB));
  EXPECT_NE(both.find("memory.host and memory.device, to \"138240KiB\" or less together"),
            std::string::npos)
      << both;
  const std::string application = message_of(of(1_MiB, 1_MiB, 300_MiB, 200_MiB));
  EXPECT_NE(application.find("batch.sequences"), std::string::npos) << application;
}

TEST(HostMemoryTest, AShortageIsAnErrorANoteOrNothing) {
  const HostMemory memory = of(40_MiB, 200_MiB, 64_MiB, 200_MiB);
  const auto shortage = shortage_of(memory);
  ASSERT_TRUE(shortage);
  const std::string error = expect_error(
      ErrorCode::kOutOfMemory, [&] { (void)settle_shortage(shortage, RoomCheck::kError); });
  EXPECT_EQ(error, *shortage + "\n  memory.check \"warn\" goes on without that memory");
  EXPECT_EQ(settle_shortage(shortage, RoomCheck::kWarn), *shortage);
  EXPECT_EQ(settle_shortage(shortage, RoomCheck::kOff), "");
  for (const RoomCheck check : {RoomCheck::kError, RoomCheck::kWarn, RoomCheck::kOff})
    EXPECT_EQ(settle_shortage(shortage_of(of(40_MiB, 96_MiB, 64_MiB, 200_MiB)), check), "");
}

TEST(HostMemoryTest, RanksShareTheHost) {
  EXPECT_NO_THROW(require_room(of(10_MiB, 20_MiB, 20_MiB, 200_MiB, 4)));
  const std::string message = expect_error(
      ErrorCode::kOutOfMemory, [] { require_room(of(10_MiB, 21_MiB, 20_MiB, 200_MiB, 4)); });
  EXPECT_NE(message.find("for each of the 4 ranks here 50.0 MiB"), std::string::npos) << message;
}

// A given budget stays; a missing one fits beside it and the application.
TEST(HostMemoryTest, BudgetsFitBesideTheApplication) {
  const std::uint64_t machine_bytes = topology().memory_bytes;
  for (const bool device_is_host : {true, false}) {
    for (const std::uint32_t ranks : {1u, 3u}) {
      for (const std::uint64_t room_bytes :
           {100_MiB, 1_GiB, machine_bytes / 2, machine_bytes, 2 * machine_bytes}) {
        for (const std::uint64_t given : {0_MiB, 20_MiB}) {
          Config::Memory memory;
          if (given != 0) memory.device_bytes = given;
          const HostMemory host{.device_is_host = device_is_host,
                                .beside_bytes = room_bytes / ranks / 4,
                                .ranks = ranks,
                                .room = {.size_bytes = room_bytes, .bound = ""}};
          const Config::Memory budgets = with_budgets(memory, host);
          EXPECT_EQ(budgets.device_bytes.has_value(), device_is_host || given != 0);
          if (given != 0) {
            EXPECT_EQ(budgets.device_bytes, given);
          }
          const std::uint64_t device =
              device_is_host ? budgets.device_bytes.value_or(0) : std::uint64_t{0};
          EXPECT_LE(device + *budgets.host_bytes + host.beside_bytes, room_bytes / ranks);
          EXPECT_LE(*budgets.host_bytes, machine_bytes / 2 / ranks);
          EXPECT_GT(*budgets.host_bytes, 0u);
        }
      }
    }
  }
  // Where there is plenty, the shares of the machine.
  const Config::Memory plenty = with_budgets({}, of(0, 0, 0, 2 * machine_bytes));
  EXPECT_EQ(plenty.device_bytes, machine_bytes / 4);
  EXPECT_EQ(plenty.host_bytes, machine_bytes / 2);
}

}  // namespace
}  // namespace sluice
