// The device contract over host memory, and what only this device has: launch(), the copy throttle,
// its checks of the caller.
#include <sluice/host_device.h>

#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "tests/contract/device_contract.h"
#include "tests/support/expect_error.h"

namespace sluice {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Host, DeviceContract,
    testing::Values(DeviceFactory{"host",
                                  [](std::uint64_t memory_bytes) {
                                    return make_host_device({.memory_bytes = memory_bytes});
                                  }},
                    DeviceFactory{"at_once",
                                  [](std::uint64_t memory_bytes) {
                                    return make_host_device({.memory_bytes = memory_bytes,
                                                             .at_once_bytes_max = kAtOnceBytes});
                                  }},
                    DeviceFactory{"throttled",
                                  [](std::uint64_t memory_bytes) {
                                    return make_host_device(
                                        {.memory_bytes = memory_bytes,
                                         .copy_bytes_per_second = 2'000'000'000});
                                  }}),
    device_factory_name);

TEST(HostDevice, AbortsWhereWhatIsDestroyedDoesNotExist) {
  EXPECT_DEATH(make_host_device({.memory_bytes = 1})->destroy_stream(StreamId{1}), "stream exists");
  EXPECT_DEATH(make_host_device({.memory_bytes = 1})->destroy_event(EventId{1}), "event exists");
}

// x -> 3 x + 1 on a compute stream between an upload and a download stream, two slots.
TEST(HostDevice, ComputesInAPipeline) {
  constexpr std::uint64_t kItems = 500;
  constexpr std::uint64_t kElements = 1024;
  constexpr std::uint64_t kItemBytes = kElements * sizeof(std::uint32_t);
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const Stream up(*device, "up");
  const Stream compute(*device, "compute");
  const Stream down(*device, "down");
  HostArray source(*device, kItems * kItemBytes);
  HostArray target(*device, kItems * kItemBytes);
  for (std::uint32_t i = 0; i < kItems * kElements; ++i) source.as<std::uint32_t>()[i] = i;
  struct Slot {
    DeviceBuffer memory;
    Event uploaded, computed, downloaded;
  };
  std::array<Slot, 2> slots;
  for (Slot& slot : slots) {
    slot = {DeviceBuffer(*device, kItemBytes, "slot"), Event(*device), Event(*device),
            Event(*device)};
  }
  for (std::uint64_t item = 0; item < kItems; ++item) {
    const Slot& slot = slots[item % 2];
    device->wait(up.id(), slot.downloaded.id());
    device->copy(slot.memory.data(), source.data() + item * kItemBytes, kItemBytes, up.id());
    device->record(slot.uploaded.id(), up.id());
    device->wait(compute.id(), slot.uploaded.id());
    device->launch(compute.id(), [memory = slot.memory.data()] {
      auto* values = reinterpret_cast<std::uint32_t*>(memory);
      for (std::uint64_t i = 0; i < kElements; ++i) values[i] = 3 * values[i] + 1;
    });
    device->record(slot.computed.id(), compute.id());
    device->wait(down.id(), slot.computed.id());
    device->copy(target.data() + item * kItemBytes, slot.memory.data(), kItemBytes, down.id());
    device->record(slot.downloaded.id(), down.id());
  }
  device->synchronize(down.id());
  for (std::uint32_t i = 0; i < kItems * kElements; ++i) {
    ASSERT_EQ(target.as<std::uint32_t>()[i], 3 * i + 1) << i;
  }
}

// Nothing is woken for it. Behind other work, a record waits for that.
TEST(HostDevice, ARecordOnAnIdleStreamIsCompleteAtOnce) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const Stream stream(*device, "compute");
  const Event idle(*device), behind(*device), again(*device);
  for (int i = 0; i < 100; ++i) {
    device->record(idle.id(), stream.id());
    EXPECT_TRUE(device->is_complete(idle.id()));
    std::promise<void> gate;
    device->launch(stream.id(), [&] { gate.get_future().wait(); });
    device->record(behind.id(), stream.id());
    EXPECT_FALSE(device->is_complete(behind.id()));
    gate.set_value();
    device->synchronize(stream.id());
    EXPECT_TRUE(device->is_complete(behind.id()));
    device->record(again.id(), stream.id());
    EXPECT_TRUE(device->is_complete(again.id()));
    EXPECT_GE(device->elapsed_ns(behind.id(), again.id()), 0);
  }
}

// Short work on an idle stream is done on return, by the caller. Longer work and work behind other
// work is the stream's, and so is everything of a device without the option.
TEST(HostDevice, ShortWorkOnAnIdleStreamIsDoneAtOnce) {
  constexpr std::uint64_t kBytes = 64;
  const auto device = make_host_device({.memory_bytes = 1_MiB, .at_once_bytes_max = kBytes});
  EXPECT_EQ(device->at_once_bytes_max(), kBytes);
  EXPECT_EQ(make_host_device({.memory_bytes = 1_MiB})->at_once_bytes_max(), 0u);
  const Stream stream(*device, "test");
  std::array<std::byte, kBytes + 1> source{}, target{};
  source.fill(std::byte{7});
  const auto caller = std::this_thread::get_id();
  for (int i = 0; i < 100; ++i) {
    target.fill(std::byte{0});
    device->copy(target.data(), source.data(), kBytes, stream.id());
    EXPECT_EQ(target[kBytes - 1], std::byte{7});
    device->fill_zero(target.data(), kBytes, stream.id());
    EXPECT_EQ(target[kBytes - 1], std::byte{0});
    std::thread::id noticed_by;
    device->notify(stream.id(), [&] { noticed_by = std::this_thread::get_id(); });
    EXPECT_EQ(noticed_by, caller);
    Gate gate;
    gate.block(*device, stream.id());  // a host function may wait, so it is the stream's
    device->copy(target.data(), source.data(), kBytes, stream.id());
    noticed_by = {};
    device->notify(stream.id(), [&] { noticed_by = std::this_thread::get_id(); });
    EXPECT_EQ(target[0], std::byte{0});
    EXPECT_EQ(noticed_by, std::thread::id());
    gate.open();
    device->synchronize(stream.id());
    EXPECT_EQ(target[0], std::byte{7});
    EXPECT_NE(noticed_by, std::thread::id());
  }
}

// One that begins while the caller does its own is not forgotten.
TEST(HostDevice, WorkThatComesWhileACallerDoesItsOwnIsDone) {
  const auto device = make_host_device({.memory_bytes = 1_MiB, .at_once_bytes_max = kAtOnceBytes});
  const Stream stream(*device, "test");
  constexpr int kEach = 2000;
  std::atomic<int> count = 0;
  const auto enqueue = [&] {
    for (int i = 0; i < kEach; ++i) device->notify(stream.id(), [&] { ++count; });
  };
  std::thread other(enqueue);
  enqueue();
  other.join();
  while (count != 2 * kEach) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

// Notices of a device that slows its copies come from the stream, in order with them.
TEST(HostDevice, ASlowedStreamDoesNothingAtOnce) {
  const auto device = make_host_device({.memory_bytes = 1_MiB,
                                        .copy_bytes_per_second = 2'000'000'000,
                                        .at_once_bytes_max = kAtOnceBytes});
  const Stream stream(*device, "test");
  std::promise<std::thread::id> noticed_by;
  device->notify(stream.id(), [&] { noticed_by.set_value(std::this_thread::get_id()); });
  EXPECT_NE(noticed_by.get_future().get(), std::this_thread::get_id());
}

// Stricter than the contract: also what was enqueued before the failure happened is skipped.
TEST(HostDevice, CopiesAlreadyEnqueuedAreSkippedAfterAFailure) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const Stream stream(*device, "test");
  std::array<std::byte, 2> memory{std::byte{7}, std::byte{0}};
  Gate gate;
  gate.block(*device, stream.id());
  device->call_host(stream.id(), [] { throw std::runtime_error("failure"); });
  device->copy(memory.data() + 1, memory.data(), 1, stream.id());
  gate.open();
  EXPECT_THROW(device->synchronize(stream.id()), std::runtime_error);
  EXPECT_EQ(memory[1], std::byte{0});
}

TEST(HostDevice, FailureOfLaunchedWorkIsRethrownAsItWasThrown) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const Stream stream(*device, "test");
  bool ran = false;
  device->launch(stream.id(), [] { throw Error(ErrorCode::kNonFinite, "the loss is NaN"); });
  device->launch(stream.id(), [&ran] { ran = true; });
  for (int i = 0; i < 2; ++i) {
    try {
      device->synchronize(stream.id());
      FAIL() << "no failure was reported";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kNonFinite);
      EXPECT_STREQ(error.what(), "the loss is NaN");
    }
  }
  EXPECT_FALSE(ran);
}

// The slow stream's work is already running when the other one fails, so that it fails as well.
TEST(HostDevice, OfTwoFailuresTheFirstIsKept) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const Stream slow(*device, "slow");
  const Stream fast(*device, "fast");
  std::promise<void> started;
  std::promise<void> released;
  device->launch(slow.id(), [&] {
    started.set_value();
    released.get_future().wait();
    throw std::runtime_error("second failure");
  });
  started.get_future().wait();
  device->launch(fast.id(), [] { throw std::runtime_error("first failure"); });
  EXPECT_THROW(device->synchronize(fast.id()), std::runtime_error);
  released.set_value();
  try {
    device->synchronize(slow.id());
    ADD_FAILURE() << "no failure was reported";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "first failure");
  }
}

// The gates keep the work, its record and what follows in one batch of the stream, whose end is not
// reached when the captures are looked at.
TEST(HostDevice, CapturesAreGoneWhenTheWorkIsDone) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const Stream stream(*device, "test");
  const Event event(*device);
  const auto captured = std::make_shared<int>(1);
  std::promise<void> started;
  Gate before;
  Gate after;
  device->launch(stream.id(), [&started] { started.set_value(); });
  started.get_future().wait();
  before.block(*device, stream.id());
  device->launch(stream.id(), [captured] {});
  device->call_host(stream.id(), [captured] {});
  device->record(event.id(), stream.id());
  after.block(*device, stream.id());
  EXPECT_EQ(captured.use_count(), 3);
  before.open();
  device->synchronize(event.id());
  EXPECT_EQ(captured.use_count(), 1);
  after.open();
}

TEST(HostDevice, DestructionFinishesTheWorkOfStreamsThatWaitForEachOther) {
  int count = 0;
  {
    const auto device = make_host_device({.memory_bytes = 1_MiB});
    std::array<StreamId, 6> streams{};
    for (StreamId& stream : streams)
      stream = device->create_stream("test", StreamPriority::kNormal);
    const EventId event = device->create_event();
    for (int i = 0; i < 600; ++i) {
      const StreamId stream = streams[static_cast<std::size_t>(i) % streams.size()];
      device->wait(stream, event);
      device->launch(stream, [&count] { ++count; });
      device->record(event, stream);
    }
    (void)device->allocate(4_KiB, "never freed");
  }
  EXPECT_EQ(count, 600);
}

TEST(HostDevice, NamesItsThreads) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const Stream stream(*device, "a name longer than fifteen");
  std::array<char, 32> name{};
  device->launch(stream.id(),
                 [&name] { pthread_getname_np(pthread_self(), name.data(), name.size()); });
  const Event done(*device);
  device->record(done.id(), stream.id());
  device->synchronize(done.id());  // who waits for the stream would run the work itself
  EXPECT_STREQ(name.data(), "a name longer t");
}

// A lower bound that holds however the threads are scheduled: 200 copies of 100 us after `begin`.
TEST(HostDevice, ThrottleBoundsTheRateOfOneStreamsCopies) {
  const auto device =
      make_host_device({.memory_bytes = 1_MiB, .copy_bytes_per_second = 100'000'000});
  const Stream stream(*device, "test");
  HostArray source(*device, 10'000);
  HostArray target(*device, 10'000);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 200; ++i) {
    device->copy(target.data(), source.data(), 10'000, stream.id());
  }
  device->synchronize(stream.id());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(20));
}

// Lower bounds again. On `second` the time counts from the end of what it waited for.
TEST(HostDevice, OccupyKeepsAStreamBusy) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const Stream first(*device, "first");
  const Stream second(*device, "second");
  const Event middle(*device);
  const Event end(*device);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 10; ++i) device->occupy(first.id(), 1'000'000);
  device->record(middle.id(), first.id());
  device->wait(second.id(), middle.id());
  device->occupy(second.id(), 5'000'000);
  device->record(end.id(), second.id());
  device->synchronize(end.id());
  // Never less, however late this or that thread was.
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(15));
}

TEST(HostDevice, OccupyIsSkippedAfterAFailure) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const Stream stream(*device, "test");
  device->launch(stream.id(), [] { throw Error(ErrorCode::kInternal, "broken"); });
  device->occupy(stream.id(), 3'600'000'000'000);
  EXPECT_THROW(device->synchronize(stream.id()), Error);
}

TEST(HostDevice, RefusesAThrottleThatLooksLikeAHang) {
  EXPECT_THROW(make_host_device({.memory_bytes = 1_MiB, .copy_bytes_per_second = 999'999}), Error);
  EXPECT_NO_THROW(make_host_device({.memory_bytes = 1_MiB, .copy_bytes_per_second = 1'000'000}));
}

class HostDeviceDeathTest : public testing::Test {
 protected:
  void SetUp() override { testing::GTEST_FLAG(death_test_style) = "threadsafe"; }
};

void expect_refused(std::string_view word, const std::function<void()>& call) {
  const std::string message = test::expect_error(ErrorCode::kInvalidArgument, call);
  EXPECT_NE(message.find(word), std::string::npos) << message;
}

TEST(HostDevice, RefusesOverlappingCopies) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const Stream stream(*device, "test");
  std::array<std::byte, 16> memory{};
  expect_refused("overlap within 8 bytes",
                 [&] { device->copy(memory.data(), memory.data() + 7, 8, stream.id()); });
  expect_refused("overlap within 8 bytes",
                 [&] { device->copy(memory.data() + 7, memory.data(), 8, stream.id()); });
  device->copy(memory.data(), memory.data() + 8, 8, stream.id());
  device->synchronize(stream.id());
}

TEST_F(HostDeviceDeathTest, RefusesMemoryItDidNotGive) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  std::byte foreign{};
  EXPECT_DEATH(device->free(&foreign), "what allocate");
}

TEST(HostDevice, RefusesToRegisterMemoryTwice) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  std::array<std::byte, 16> memory{};
  device->register_host_memory(memory);
  expect_refused("registered already", [&] { device->register_host_memory(memory); });
  device->unregister_host_memory(memory);
}

TEST(HostDevice, RefusesElapsedTimeOfEventsThatHaveNotHappened) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const Event event(*device);
  expect_refused("never recorded", [&] { (void)device->elapsed_ns(event.id(), event.id()); });
}

}  // namespace
}  // namespace sluice
