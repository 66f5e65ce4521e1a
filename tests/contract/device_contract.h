// What every Device must do, as cases: memory, streams, events, failures. An implementation's test
// program includes this header once and instantiates DeviceContract with a factory. Values are
// checked through host memory alone, so that the cases hold where the CPU cannot read device
// memory.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/units.h"
#include "gpu/device.h"

namespace sluice {

struct DeviceFactory {
  std::string name;
  // Null when the machine has no such device; the cases then skip.
  std::function<std::unique_ptr<Device>(std::uint64_t memory_bytes)> make;
};

// Page-locked host memory. `device` must outlive it.
class HostArray {
 public:
  HostArray(Device& device, std::uint64_t size_bytes)
      : device_(device), buffer_(size_bytes, "a test") {
    device_.register_host_memory(buffer_.span());
  }
  HostArray(const HostArray&) = delete;
  HostArray& operator=(const HostArray&) = delete;
  ~HostArray() { device_.unregister_host_memory(buffer_.span()); }

  std::byte* data() const { return buffer_.data(); }
  std::uint64_t size_bytes() const { return buffer_.size_bytes(); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(buffer_.data());
  }
  void fill_pattern(std::uint32_t seed) {
    std::minstd_rand random(seed + 1);
    for (std::byte& byte : buffer_.span()) byte = static_cast<std::byte>(random() >> 8);
  }

 private:
  Device& device_;
  AlignedBuffer buffer_;
};

// Holds a stream back until it is opened; opening twice or never is fine.
class Gate {
 public:
  ~Gate() { open(); }
  void block(Device& device, StreamId stream) {
    device.call_host(stream, [opened = opened_] { opened.wait(); });
  }
  void open() {
    if (!is_open_) promise_.set_value();
    is_open_ = true;
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> opened_ = promise_.get_future().share();
  bool is_open_ = false;
};

class DeviceContract : public testing::TestWithParam<DeviceFactory> {
 protected:
  static constexpr std::uint64_t kMemoryBytes = 64_MiB;

  void SetUp() override {
    device_ = GetParam().make(kMemoryBytes);
    if (device_ == nullptr) GTEST_SKIP() << "this machine has no " << GetParam().name << " device";
  }
  Device& device() { return *device_; }

  std::unique_ptr<Device> device_;
};

inline std::string device_factory_name(const testing::TestParamInfo<DeviceFactory>& info) {
  return info.param.name;
}

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

// Streams.

TEST_P(DeviceContract, WorkOnOneStreamRunsInOrder) {
  const Stream stream(device(), "test");
  std::vector<int> seen;
  for (int i = 0; i < 1000; ++i) device().call_host(stream.id(), [&seen, i] { seen.push_back(i); });
  device().synchronize(stream.id());
  ASSERT_EQ(seen.size(), 1000u);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(seen[static_cast<std::size_t>(i)], i);
}

TEST_P(DeviceContract, HostFunctionsAndCopiesKeepTheirOrder) {
  const Stream stream(device(), "test");
  HostArray value(device(), sizeof(std::uint64_t));
  HostArray copies(device(), 200 * sizeof(std::uint64_t));
  const DeviceBuffer buffer(device(), sizeof(std::uint64_t), "test");
  for (std::uint64_t i = 0; i < 200; ++i) {
    device().call_host(stream.id(), [&value, i] { *value.as<std::uint64_t>() = i * i; });
    device().copy(buffer.data(), value.data(), 8, stream.id());
    device().call_host(stream.id(), [&value] { *value.as<std::uint64_t>() = ~std::uint64_t{0}; });
    device().copy(copies.data() + 8 * i, buffer.data(), 8, stream.id());
  }
  device().synchronize(stream.id());
  for (std::uint64_t i = 0; i < 200; ++i) ASSERT_EQ(copies.as<std::uint64_t>()[i], i * i);
}

// The copy stands behind work that only this thread can release: were copy() to wait for it, or to
// run ahead of it, the case would hang or see the wrong bytes.
TEST_P(DeviceContract, EnqueueingReturnsBeforeTheWorkIsDone) {
  const Stream stream(device(), "test");
  const Event event(device());
  HostArray source(device(), 4096);
  HostArray target(device(), 4096);
  Gate gate;
  gate.block(device(), stream.id());
  device().copy(target.data(), source.data(), 4096, stream.id());
  device().record(event.id(), stream.id());
  EXPECT_FALSE(device().is_complete(event.id()));
  source.fill_pattern(7);
  gate.open();
  device().synchronize(event.id());
  EXPECT_TRUE(device().is_complete(event.id()));
  EXPECT_EQ(std::memcmp(target.data(), source.data(), 4096), 0);
}

TEST_P(DeviceContract, StreamsRunConcurrently) {
  const Stream held(device(), "held");
  const Stream free(device(), "free");
  Gate gate;
  gate.block(device(), held.id());
  bool ran = false;
  device().call_host(free.id(), [&ran] { ran = true; });
  device().synchronize(free.id());
  EXPECT_TRUE(ran);
  gate.open();
}

TEST_P(DeviceContract, DestroyingAStreamWaitsForItsWork) {
  std::atomic<int> count{0};
  {
    const Stream stream(device(), "test");
    device().call_host(stream.id(),
                       [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
    for (int i = 0; i < 100; ++i) device().call_host(stream.id(), [&count] { ++count; });
  }
  EXPECT_EQ(count, 100);
}

// Events.

TEST_P(DeviceContract, EventNeverRecordedCountsAsComplete) {
  const Stream stream(device(), "test");
  const Event event(device());
  EXPECT_TRUE(device().is_complete(event.id()));
  device().synchronize(event.id());
  device().wait(stream.id(), event.id());
  device().synchronize(stream.id());
}

TEST_P(DeviceContract, WaitOrdersOneStreamBehindAnother) {
  const Stream producer(device(), "producer");
  const Stream consumer(device(), "consumer");
  const Event event(device());
  HostArray source(device(), 4096);
  HostArray target(device(), 4096);
  const DeviceBuffer buffer(device(), 4096, "test");
  Gate gate;
  source.fill_pattern(3);
  gate.block(device(), producer.id());
  device().copy(buffer.data(), source.data(), 4096, producer.id());
  device().record(event.id(), producer.id());
  device().wait(consumer.id(), event.id());
  device().copy(target.data(), buffer.data(), 4096, consumer.id());
  gate.open();
  device().synchronize(consumer.id());
  EXPECT_EQ(std::memcmp(target.data(), source.data(), 4096), 0);
}

TEST_P(DeviceContract, WaitOnAnEventOfTheSameStreamPasses) {
  const Stream stream(device(), "test");
  const Event event(device());
  device().record(event.id(), stream.id());
  device().wait(stream.id(), event.id());
  device().synchronize(stream.id());
}

// The second record can complete only after the wait has passed: a wait that looked at the event
// when it ran, and not when it was called, would hang.
TEST_P(DeviceContract, RecordingAgainDoesNotProlongAnEarlierWait) {
  const Stream producer(device(), "producer");
  const Stream consumer(device(), "consumer");
  const Event event(device());
  Gate first;
  Gate second;
  first.block(device(), producer.id());
  device().record(event.id(), producer.id());
  device().wait(consumer.id(), event.id());
  second.block(device(), producer.id());
  device().record(event.id(), producer.id());
  first.open();
  device().synchronize(consumer.id());
  EXPECT_FALSE(device().is_complete(event.id()));
  second.open();
  device().synchronize(event.id());
}

TEST_P(DeviceContract, RecordingAgainDoesNotCutAnEarlierWaitShort) {
  const Stream held(device(), "held");
  const Stream fast(device(), "fast");
  const Stream consumer(device(), "consumer");
  const Event event(device());
  Gate gate;
  std::atomic<bool> first_done{false};
  bool in_order = false;
  gate.block(device(), held.id());
  device().call_host(held.id(), [&first_done] { first_done = true; });
  device().record(event.id(), held.id());
  device().wait(consumer.id(), event.id());
  device().call_host(consumer.id(), [&] { in_order = first_done; });
  device().record(event.id(), fast.id());
  device().synchronize(event.id());  // the record on `fast`, which nothing holds back
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // time for a wrong wait to pass
  gate.open();
  device().synchronize(consumer.id());
  EXPECT_TRUE(in_order);
}

TEST_P(DeviceContract, WaitMeansTheLatestRecord) {
  const Stream producer(device(), "producer");
  const Stream consumer(device(), "consumer");
  const Event event(device());
  Gate gate;
  std::atomic<bool> second_done{false};
  bool in_order = false;
  device().record(event.id(), producer.id());
  device().synchronize(event.id());
  gate.block(device(), producer.id());
  device().call_host(producer.id(), [&second_done] { second_done = true; });
  device().record(event.id(), producer.id());
  device().wait(consumer.id(), event.id());
  device().call_host(consumer.id(), [&] { in_order = second_done; });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // time for a wrong wait to pass
  gate.open();
  device().synchronize(consumer.id());
  EXPECT_TRUE(in_order);
}

TEST_P(DeviceContract, DestroyingAPendingEventKeepsItsWaits) {
  const Stream producer(device(), "producer");
  const Stream consumer(device(), "consumer");
  Gate gate;
  std::atomic<bool> produced{false};
  bool in_order = false;
  gate.block(device(), producer.id());
  device().call_host(producer.id(), [&produced] { produced = true; });
  {
    const Event event(device());
    device().record(event.id(), producer.id());
    device().wait(consumer.id(), event.id());
  }
  device().call_host(consumer.id(), [&] { in_order = produced; });
  gate.open();
  device().synchronize(consumer.id());
  EXPECT_TRUE(in_order);
}

TEST_P(DeviceContract, ElapsedTimeGrowsAlongAStream) {
  const Stream stream(device(), "test");
  std::array<Event, 20> events;
  for (Event& event : events) event = Event(device());
  for (std::size_t i = 0; i < events.size(); ++i) {
    if (i == 10) {
      device().call_host(stream.id(),
                         [] { std::this_thread::sleep_for(std::chrono::milliseconds(10)); });
    }
    device().record(events[i].id(), stream.id());
  }
  device().synchronize(stream.id());
  for (std::size_t i = 1; i < events.size(); ++i) {
    EXPECT_GE(device().elapsed_ns(events[i - 1].id(), events[i].id()), 0);
  }
  // The sleep is a lower bound of what lies between; how long it really took does not matter.
  EXPECT_GE(device().elapsed_ns(events[9].id(), events[10].id()), 9'000'000);
  EXPECT_LE(device().elapsed_ns(events[10].id(), events[9].id()), -9'000'000);
  EXPECT_EQ(device().elapsed_ns(events[4].id(), events[4].id()), 0);
}

// Failures.

TEST_P(DeviceContract, FirstFailureIsKeptAndLaterWorkSkippedWhileEventsComplete) {
  const Stream failing(device(), "failing");
  const Stream other(device(), "other");
  const Event failed(device());
  const Event after(device());
  HostArray source(device(), 64);
  HostArray target(device(), 64);
  source.fill_pattern(1);
  bool ran = false;
  device().call_host(failing.id(), [] { throw std::runtime_error("first failure"); });
  device().call_host(failing.id(), [] { throw std::runtime_error("second failure"); });
  device().record(failed.id(), failing.id());
  device().wait(other.id(), failed.id());
  device().call_host(other.id(), [&ran] { ran = true; });
  device().copy(target.data(), source.data(), 64, other.id());
  device().record(after.id(), other.id());
  const auto expect_first = [](const auto& synchronize) {
    try {
      synchronize();
      ADD_FAILURE() << "no failure was reported";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "first failure");
    }
  };
  expect_first([&] { device().synchronize(after.id()); });
  expect_first([&] { device().synchronize(failing.id()); });
  expect_first([&] { device().synchronize(other.id()); });
  EXPECT_TRUE(device().is_complete(after.id()));
  EXPECT_FALSE(ran);
  EXPECT_EQ(target.data()[0], std::byte{0});
}

// Whole pipelines.

// Up, across and down on three streams through two slots each: every slot is reused 150 times, and
// a missing or misplaced wait shows as a wrong item.
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

// Random operations on shared cells, ordered by events alone, against the same ones in program
// order.
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

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceContract);

}  // namespace sluice
