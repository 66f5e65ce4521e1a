// Cases of the device contract: order, asynchrony and failures of streams.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/contract/device_contract_fixture.h"

namespace sluice {

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

// The copy is enqueued after work that only this thread can release. If copy() waited for this
// work, the case would hang. If the copy ran before this work, the case would see the wrong bytes.
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
  const Stream free(device(), "free", StreamPriority::kHigh);
  HostArray source(device(), 4096);
  HostArray target(device(), 4096);
  const DeviceBuffer buffer(device(), 4096, "test");
  source.fill_pattern(5);
  Gate gate;
  gate.block(device(), held.id());
  device().copy(buffer.data(), source.data(), 4096, free.id());
  device().copy(target.data(), buffer.data(), 4096, free.id());
  device().synchronize(free.id());
  EXPECT_EQ(std::memcmp(target.data(), source.data(), 4096), 0);
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

// The case enqueues only a few calls of notify(). While earlier work is held back, a GPU accepts
// only a limited number of further calls. A test with 100 calls of notify() was blocked on an H100,
// so the test never reached the line that opens the gate.
TEST_P(DeviceContract, ReportsComeInOrderAfterTheWorkBeforeThem) {
  constexpr int kReports = 20;
  const Stream stream(device(), "test");
  HostArray source(device(), 4096);
  HostArray target(device(), 4096);
  const DeviceBuffer buffer(device(), 4096, "test");
  std::vector<int> order;
  std::atomic<int> count{0};
  bool has_bytes = true;
  Gate gate;
  gate.block(device(), stream.id());
  for (int i = 0; i < kReports; ++i) {
    source.as<int>()[i] = i + 1;
    device().copy(buffer.data() + i * sizeof(int), source.data() + i * sizeof(int), sizeof(int),
                  stream.id());
    device().copy(target.data() + i * sizeof(int), buffer.data() + i * sizeof(int), sizeof(int),
                  stream.id());
    device().notify(stream.id(), [&, i] {
      order.push_back(i);
      has_bytes = has_bytes && target.as<int>()[i] == i + 1;
      ++count;
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1));  // time for a premature report
  EXPECT_EQ(count, 0);
  gate.open();
  while (count != kReports) std::this_thread::sleep_for(std::chrono::microseconds(100));
  EXPECT_TRUE(has_bytes);
  ASSERT_EQ(order.size(), std::size_t{kReports});
  EXPECT_TRUE(std::ranges::is_sorted(order));
}

TEST_P(DeviceContract, DestroyingAStreamWaitsForItsReports) {
  std::atomic<int> count{0};
  {
    const Stream stream(device(), "test");
    for (int i = 0; i < 10; ++i) {
      device().notify(stream.id(), [&count] {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        ++count;
      });
    }
  }
  EXPECT_EQ(count, 10);
}

// Failures.

TEST_P(DeviceContract, AReportThatThrowsIsAFailureAndLaterOnesCome) {
  const Stream stream(device(), "test");
  std::atomic<bool> has_come{false};
  device().notify(stream.id(), [] { throw std::runtime_error("a report's failure"); });
  device().notify(stream.id(), [&has_come] { has_come = true; });
  while (!has_come) std::this_thread::sleep_for(std::chrono::microseconds(100));
  EXPECT_THROW(device().synchronize(stream.id()), std::runtime_error);
}

TEST_P(DeviceContract, FirstFailureIsKeptAndLaterCopiesSkippedWhileEventsAndHostFunctionsGoOn) {
  const Stream failing(device(), "failing");
  const Stream other(device(), "other");
  const Event failed(device());
  const Event after(device());
  HostArray source(device(), 64);
  HostArray target(device(), 64);
  const DeviceBuffer buffer(device(), 64, "test");
  source.fill_pattern(1);
  bool ran = false;
  const auto expect_first = [](const auto& synchronize) {
    try {
      synchronize();
      ADD_FAILURE() << "no failure was reported";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "first failure");
    }
  };
  device().copy(buffer.data(), source.data(), 64, other.id());
  device().synchronize(other.id());
  device().call_host(failing.id(), [] { throw std::runtime_error("first failure"); });
  device().call_host(failing.id(), [] { throw std::runtime_error("second failure"); });
  device().record(failed.id(), failing.id());
  expect_first([&] { device().synchronize(failed.id()); });
  device().wait(other.id(), failed.id());
  device().call_host(other.id(), [&ran] { ran = true; });
  device().copy(target.data(), buffer.data(), 64, other.id());
  device().copy(target.data() + 1, source.data(), 1, other.id());
  device().record(after.id(), other.id());
  expect_first([&] { device().synchronize(after.id()); });
  expect_first([&] { device().synchronize(failing.id()); });
  expect_first([&] { device().synchronize(other.id()); });
  EXPECT_TRUE(device().is_complete(after.id()));
  EXPECT_TRUE(ran);
  EXPECT_EQ(target.data()[0], std::byte{0});
  EXPECT_EQ(target.data()[1], std::byte{0});
}

}  // namespace sluice
