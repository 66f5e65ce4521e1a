// Cases of the device contract: memory, its budget, and copies.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <sluice/error.h>
#include "tests/contract/device_contract_fixture.h"

namespace sluice {

// Memory.

TEST_P(DeviceContract, HasANameAndTheCapacityAskedFor) {
  EXPECT_FALSE(device().name().empty());
  EXPECT_EQ(device().capacity_bytes(), kMemoryBytes);
  EXPECT_EQ(device().allocated_bytes(), 0u);
}

TEST_P(DeviceContract, MemoryIsAlignedAndZeroFilledAlsoWhenReused) {
  const Stream stream(device(), "test");
  const std::uint64_t size_bytes = 3_MiB + 5;
  HostArray host(device(), size_bytes);
  for (int round = 0; round < 3; ++round) {
    const DeviceBuffer buffer(device(), size_bytes, "test");
    EXPECT_TRUE(is_aligned(reinterpret_cast<std::uintptr_t>(buffer.data()), 4_KiB));
    std::memset(host.data(), 0xa5, size_bytes);
    device().copy(host.data(), buffer.data(), size_bytes, stream.id());
    device().synchronize(stream.id());
    for (std::uint64_t i = 0; i < size_bytes; ++i) ASSERT_EQ(host.data()[i], std::byte{0}) << i;
    std::memset(host.data(), 0xff, size_bytes);
    device().copy(buffer.data(), host.data(), size_bytes, stream.id());
    device().synchronize(stream.id());
  }
}

TEST_P(DeviceContract, NothingIsAllocatedForZeroBytes) {
  EXPECT_EQ(device().allocate(0, "nothing"), nullptr);
  device().free(nullptr);
  EXPECT_EQ(device().allocated_bytes(), 0u);
}

TEST_P(DeviceContract, BudgetIsKeptToTheByteAndGivenBack) {
  {
    const DeviceBuffer first(device(), kMemoryBytes - 4_MiB, "first");
    const DeviceBuffer second(device(), 4_MiB, "second");
    EXPECT_EQ(device().allocated_bytes(), kMemoryBytes);
    EXPECT_THROW(device().allocate(4_KiB, "third"), Error);
    EXPECT_EQ(device().allocated_bytes(), kMemoryBytes);
  }
  EXPECT_EQ(device().allocated_bytes(), 0u);
  const DeviceBuffer all(device(), kMemoryBytes, "all");
  EXPECT_EQ(device().allocated_bytes(), kMemoryBytes);
}

TEST_P(DeviceContract, OutOfMemoryNamesRequestTakenAndCapacity) {
  const DeviceBuffer first(device(), 24_MiB, "gradient slots");
  const DeviceBuffer second(device(), 16_MiB, "parameter window");
  try {
    device().allocate(48_MiB, "boundary activations");
    FAIL() << "48 MiB were granted out of 24 MiB";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    const std::string message = error.what();
    for (const char* part : {"48.0 MiB", "boundary activations", "40.0 MiB", "64.0 MiB",
                             "gradient slots", "parameter window"}) {
      EXPECT_NE(message.find(part), std::string::npos) << part << " is missing in: " << message;
    }
  }
}

TEST_P(DeviceContract, AbsurdRequestIsRefusedWithoutOverflow) {
  const DeviceBuffer first(device(), 1_MiB, "first");
  EXPECT_THROW(device().allocate(~std::uint64_t{0}, "too much"), Error);
  EXPECT_THROW(device().allocate(~std::uint64_t{0} - 1_MiB + 1, "too much"), Error);
}

// Copies.

TEST_P(DeviceContract, CopiesOfOddSizesAndOffsetsMoveTheirBytesAndNoOthers) {
  const Stream stream(device(), "test");
  const std::uint64_t size_bytes = 3_MiB + 100;
  HostArray source(device(), size_bytes);
  HostArray target(device(), size_bytes);
  const DeviceBuffer a(device(), size_bytes, "a");
  const DeviceBuffer b(device(), size_bytes, "b");
  std::uint32_t seed = 0;
  for (const std::uint64_t count : {1ull, 3ull, 255ull, 4095ull, 4097ull, 65537ull, 3145733ull}) {
    for (const std::uint64_t offset : {0ull, 1ull, 63ull}) {
      source.fill_pattern(++seed);
      std::memset(target.data(), 0x5a, size_bytes);
      device().copy(a.data() + offset, source.data() + offset, count, stream.id());
      device().copy(b.data() + 2, a.data() + offset, count, stream.id());
      device().copy(target.data() + offset, b.data() + 2, count, stream.id());
      device().synchronize(stream.id());
      ASSERT_EQ(std::memcmp(target.data() + offset, source.data() + offset, count), 0);
      for (std::uint64_t i = 0; i < offset; ++i) ASSERT_EQ(target.data()[i], std::byte{0x5a});
      for (std::uint64_t i = offset + count; i < size_bytes; ++i)
        ASSERT_EQ(target.data()[i], std::byte{0x5a}) << i;
    }
  }
}

TEST_P(DeviceContract, CopiesHostToHost) {
  const Stream stream(device(), "test");
  HostArray source(device(), 10001);
  HostArray target(device(), 10001);
  source.fill_pattern(1);
  device().copy(target.data(), source.data(), 10001, stream.id());
  device().synchronize(stream.id());
  EXPECT_EQ(std::memcmp(target.data(), source.data(), 10001), 0);
}

TEST_P(DeviceContract, CopiesAndFillsOfZeroBytesDoNothing) {
  const Stream stream(device(), "test");
  device().copy(nullptr, nullptr, 0, stream.id());
  device().fill_zero(nullptr, 0, stream.id());
  device().synchronize(stream.id());
}

TEST_P(DeviceContract, FillZeroLeavesTheNeighbours) {
  const Stream stream(device(), "test");
  const std::uint64_t size_bytes = 9000;
  HostArray host(device(), size_bytes);
  const DeviceBuffer buffer(device(), size_bytes, "test");
  std::memset(host.data(), 0x77, size_bytes);
  device().copy(buffer.data(), host.data(), size_bytes, stream.id());
  device().fill_zero(buffer.data() + 13, 8191, stream.id());
  device().copy(host.data(), buffer.data(), size_bytes, stream.id());
  device().synchronize(stream.id());
  for (std::uint64_t i = 0; i < size_bytes; ++i) {
    ASSERT_EQ(host.data()[i], i < 13 || i >= 13 + 8191 ? std::byte{0x77} : std::byte{0}) << i;
  }
}

// The case copies four kinds of pieces: pieces that lie apart, adjacent pieces, empty pieces, and
// pieces with both ends on the host.
TEST_P(DeviceContract, SeveralCopiesAtOnceAreAsOneAfterAnother) {
  constexpr std::uint64_t kPieceBytes = 3000;
  constexpr std::uint64_t kPieces = 40;
  const Stream stream(device(), "test");
  const DeviceBuffer middle(device(), kPieces * kPieceBytes, "test");
  HostArray source(device(), kPieces * kPieceBytes);
  HostArray target(device(), kPieces * kPieceBytes);
  source.fill_pattern(1);
  for (const std::uint64_t count :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{7}, kPieces}) {
    std::memset(target.data(), 0, target.size_bytes());
    std::vector<CopyPiece> up;
    std::vector<CopyPiece> down;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t from = i * kPieceBytes;
      const std::uint64_t to = (kPieces - 1 - i) * kPieceBytes;  // reversed, so none are adjacent
      up.push_back({middle.data() + to, source.data() + from, i == 3 ? 0 : kPieceBytes});
      const bool is_from_host = i % 5 == 4;
      down.push_back({target.data() + from,
                      is_from_host ? source.data() + from : middle.data() + to,
                      i == 3 ? 0 : kPieceBytes});
    }
    device().copy_all(up, stream.id());
    device().copy_all(down, stream.id());
    device().synchronize(stream.id());
    for (std::uint64_t i = 0; i < kPieces; ++i) {
      const std::byte* const actual = target.data() + i * kPieceBytes;
      const bool is_copied = i < count && i != 3;
      for (std::uint64_t at = 0; at < kPieceBytes; ++at)
        ASSERT_EQ(actual[at], is_copied ? source.data()[i * kPieceBytes + at] : std::byte{0})
            << "piece " << i << " of " << count << ", byte " << at;
    }
  }
}

// In this case, copy_all() is the first call that the thread makes to the device.
TEST_P(DeviceContract, AThreadMayBeginWithSeveralCopies) {
  const Stream stream(device(), "test");
  const DeviceBuffer middle(device(), 8192, "test");
  HostArray source(device(), 8192);
  HostArray target(device(), 8192);
  source.fill_pattern(1);
  const auto swapped = [](std::byte* to, const std::byte* from) {
    return std::array{CopyPiece{to, from + 4096, 4096}, CopyPiece{to + 4096, from, 4096}};
  };
  std::thread([&] {
    device().copy_all(swapped(middle.data(), source.data()), stream.id());
  }).join();
  device().copy_all(swapped(target.data(), middle.data()), stream.id());
  device().synchronize(stream.id());
  EXPECT_EQ(std::memcmp(target.data(), source.data(), 8192), 0);
}

TEST_P(DeviceContract, ANullAmongSeveralCopiesIsRefused) {
  const Stream stream(device(), "test");
  const DeviceBuffer buffer(device(), 4_KiB, "test");
  HostArray host(device(), 4_KiB);
  const std::vector<CopyPiece> pieces{{buffer.data(), host.data(), 1_KiB},
                                      {nullptr, host.data() + 1_KiB, 1_KiB}};
  EXPECT_THROW(device().copy_all(pieces, stream.id()), Error);
  EXPECT_THROW(device().copy_all(pieces, StreamId{99}), Error);
  device().synchronize(stream.id());
}

}  // namespace sluice
