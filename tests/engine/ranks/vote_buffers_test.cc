// Copies that are still pending when the buffers are used again, as after a collective that has
// thrown.
#include "engine/ranks/vote_buffers.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <thread>

#include <sluice/host_device.h>
#include <sluice/units.h>

namespace sluice::test {
namespace {

constexpr std::chrono::milliseconds kLate{100};

struct Late {
  void begin() {
    device->launch(stream.id(), [] { std::this_thread::sleep_for(kLate); });
  }

  std::unique_ptr<HostDevice> device = make_host_device({.memory_bytes = 1_MiB});
  Stream stream{*device, "late"};
};

TEST(VoteBuffers, ALaterPutDoesNotChangeWhatAnEarlierOneCopies) {
  Late late;
  VoteBuffers buffers(*late.device, 4_KiB, "votes");
  const std::array<std::byte, 2> first{std::byte{1}, std::byte{2}};
  const std::array<std::byte, 2> second{std::byte{3}, std::byte{4}};
  late.begin();
  buffers.put(first, 0, late.stream.id());
  buffers.put(second, 2, late.stream.id());
  std::array<std::byte, 4> all{};
  buffers.get(all, late.stream.id());
  EXPECT_EQ(all, (std::array<std::byte, 4>{first[0], first[1], second[0], second[1]}));
}

TEST(VoteBuffers, TheEndWaitsForAPendingCopy) {
  Late late;
  std::optional<VoteBuffers> buffers(std::in_place, *late.device, 4_KiB, "votes");
  late.begin();
  const auto begin = std::chrono::steady_clock::now();
  const std::array<std::byte, 1> value{std::byte{1}};
  buffers->put(value, 0, late.stream.id());
  buffers.reset();
  EXPECT_GE(std::chrono::steady_clock::now() - begin, kLate / 2) << "the memory went first";
}

}  // namespace
}  // namespace sluice::test
