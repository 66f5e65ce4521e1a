// Cases of the device contract: whole programs over several streams. The cases check the results of
// the programs.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "tests/contract/device_contract_fixture.h"

namespace sluice {

// Whole pipelines.

// The program copies items to the device, within the device and back to the host. Each of the three
// copies has its own stream, and the items go through two slots. Every slot is reused 150 times, so
// a missing or misplaced wait gives a wrong item.
TEST_P(DeviceContract, PipelineThroughTwoSlotsDeliversEveryItem) {
  constexpr std::uint64_t kItems = 300;
  constexpr std::uint64_t kItemBytes = 32_KiB;
  const Stream up(device(), "up");
  const Stream across(device(), "across");
  const Stream down(device(), "down");
  HostArray source(device(), kItems * kItemBytes);
  HostArray target(device(), kItems * kItemBytes);
  source.fill_pattern(11);
  struct Slot {
    DeviceBuffer in, out;
    Event uploaded, consumed, downloaded;
  };
  std::array<Slot, 2> slots;
  for (Slot& slot : slots) {
    slot.in = DeviceBuffer(device(), kItemBytes, "in");
    slot.out = DeviceBuffer(device(), kItemBytes, "out");
    for (Event* event : {&slot.uploaded, &slot.consumed, &slot.downloaded}) {
      *event = Event(device());
    }
  }
  for (std::uint64_t item = 0; item < kItems; ++item) {
    const Slot& slot = slots[item % slots.size()];
    device().wait(up.id(), slot.consumed.id());
    device().copy(slot.in.data(), source.data() + item * kItemBytes, kItemBytes, up.id());
    device().record(slot.uploaded.id(), up.id());
    device().wait(across.id(), slot.uploaded.id());
    device().wait(across.id(), slot.downloaded.id());
    device().copy(slot.out.data(), slot.in.data(), kItemBytes, across.id());
    device().record(slot.consumed.id(), across.id());
    device().wait(down.id(), slot.consumed.id());
    device().copy(target.data() + item * kItemBytes, slot.out.data(), kItemBytes, down.id());
    device().record(slot.downloaded.id(), down.id());
  }
  device().synchronize(down.id());
  EXPECT_EQ(std::memcmp(target.data(), source.data(), kItems * kItemBytes), 0);
}

// Runs random operations on shared cells. Only events order these operations. The results must
// equal the results of the same operations in program order.
TEST_P(DeviceContract, RandomProgramOrderedByEventsEqualsSequentialRun) {
  constexpr std::size_t kStreams = 8;
  constexpr std::size_t kCells = 12;
  constexpr int kOperations = 3000;
  std::array<Stream, kStreams> streams;
  for (Stream& stream : streams) stream = Stream(device(), "random");
  struct Cell {
    std::uint64_t value = 1;
    Event written;
    std::array<Event, kStreams> read;
  };
  std::array<Cell, kCells> cells;
  std::array<std::uint64_t, kCells> expected;
  expected.fill(1);
  for (Cell& cell : cells) {
    cell.written = Event(device());
    for (Event& event : cell.read) event = Event(device());
  }
  std::mt19937 random(20240607);
  for (int operation = 0; operation < kOperations; ++operation) {
    const std::size_t stream = random() % kStreams;
    const std::size_t from = random() % kCells;
    const std::size_t to = (from + 1 + random() % (kCells - 1)) % kCells;
    const StreamId id = streams[stream].id();
    device().wait(id, cells[from].written.id());
    device().wait(id, cells[to].written.id());
    for (const Event& read : cells[to].read) device().wait(id, read.id());
    std::uint64_t* target = &cells[to].value;
    const std::uint64_t* source = &cells[from].value;
    const auto addend = static_cast<std::uint64_t>(operation);
    device().call_host(id, [=] { *target = *target * 6364136223846793005u + *source + addend; });
    device().record(cells[to].written.id(), id);
    device().record(cells[from].read[stream].id(), id);
    expected[to] = expected[to] * 6364136223846793005u + expected[from] + addend;
  }
  for (const Stream& stream : streams) device().synchronize(stream.id());
  for (std::size_t i = 0; i < kCells; ++i) EXPECT_EQ(cells[i].value, expected[i]) << i;
}

TEST_P(DeviceContract, ManyThreadsUseOneDevice) {
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([this, thread, &right] {
      for (int round = 0; round < 25; ++round) {
        const Stream up(device(), "up");
        const Stream down(device(), "down");
        const Event uploaded(device());
        const DeviceBuffer buffer(device(), 10000, "a thread's");
        HostArray source(device(), 10000);
        HostArray target(device(), 10000);
        source.fill_pattern(static_cast<std::uint32_t>(100 * thread + round));
        device().copy(buffer.data(), source.data(), 10000, up.id());
        device().record(uploaded.id(), up.id());
        device().wait(down.id(), uploaded.id());
        device().copy(target.data(), buffer.data(), 10000, down.id());
        device().synchronize(down.id());
        right += std::memcmp(source.data(), target.data(), 10000) == 0 ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 100);
  EXPECT_EQ(device().allocated_bytes(), 0u);
}

}  // namespace sluice
