// Cases of the device contract: events, waits across streams, and time between records.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "tests/contract/device_contract_fixture.h"

namespace sluice {

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

// The second record can complete only after the wait has passed. The wait has to use the state that
// the event has when wait() is called. If the wait used a later state of the event, the case would
// hang.
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

// In this case, the earlier record has already completed, but the stream has not reached the wait
// yet. CUDA runs one callback at a time, so the gates must be reached in the order in which they
// open.
TEST_P(DeviceContract, RecordingAgainDoesNotProlongAWaitForWhatHasCompleted) {
  const Stream producer(device(), "producer");
  const Stream consumer(device(), "consumer");
  const Event event(device());
  Gate first;
  Gate before;
  Gate second;
  first.block(device(), producer.id());
  device().record(event.id(), producer.id());
  first.await_reached();
  before.block(device(), consumer.id());
  device().wait(consumer.id(), event.id());
  first.open();
  device().synchronize(event.id());
  before.await_reached();
  second.block(device(), producer.id());
  device().record(event.id(), producer.id());
  before.open();
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
  device().synchronize(event.id());  // waits for the record on `fast`, which nothing delays
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
  // The time between the records is at least as long as the sleep. The case does not check the
  // exact duration.
  EXPECT_GE(device().elapsed_ns(events[9].id(), events[10].id()), 9'000'000);
  EXPECT_LE(device().elapsed_ns(events[10].id(), events[9].id()), -9'000'000);
  EXPECT_EQ(device().elapsed_ns(events[4].id(), events[4].id()), 0);
}

}  // namespace sluice
