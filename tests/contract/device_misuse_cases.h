// These test cases make calls that the contract of devices forbids. A forbidden call fails with
// kInvalidArgument, and the device stays usable.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include <sluice/error.h>
#include "tests/contract/device_contract_fixture.h"
#include "tests/support/expect_error.h"

namespace sluice {

inline void expect_misuse(std::string_view word, const std::function<void()>& call) {
  const std::string message = test::expect_error(ErrorCode::kInvalidArgument, call);
  EXPECT_NE(message.find(word), std::string::npos) << message;
}

TEST_P(DeviceContract, IdsThatItDidNotGiveAreRefused) {
  const Stream stream(device(), "test");
  const Event event(device());
  const StreamId gone = Stream(device(), "gone").id();
  const EventId lost = Event(device()).id();
  const DeviceBuffer buffer(device(), 4096, "test");
  expect_misuse("stream 0 does not exist", [&] { device().synchronize(StreamId{}); });
  expect_misuse("event 0 does not exist", [&] { device().synchronize(EventId{}); });
  expect_misuse("destroyed", [&] { device().synchronize(gone); });
  expect_misuse("stream", [&] { device().record(event.id(), gone); });
  expect_misuse("event", [&] { device().record(lost, stream.id()); });
  expect_misuse("event", [&] { device().wait(stream.id(), lost); });
  expect_misuse("event", [&] { (void)device().is_complete(lost); });
  expect_misuse("stream", [&] { device().fill_zero(buffer.data(), 4096, gone); });
  expect_misuse("stream", [&] { device().call_host(gone, [] {}); });
  device().synchronize(stream.id());
}

TEST_P(DeviceContract, NullRangesAndEmptyFunctionsAreRefused) {
  const Stream stream(device(), "test");
  const DeviceBuffer buffer(device(), 4096, "test");
  expect_misuse("copy: target or source is null",
                [&] { device().copy(buffer.data(), nullptr, 8, stream.id()); });
  expect_misuse("copy: target or source is null",
                [&] { device().copy(nullptr, buffer.data(), 8, stream.id()); });
  expect_misuse("fill_zero: the target is null",
                [&] { device().fill_zero(nullptr, 8, stream.id()); });
  expect_misuse("call_host: the function is empty", [&] { device().call_host(stream.id(), {}); });
  device().synchronize(stream.id());
}

// The error becomes a failure of the stream's work, like every exception that a host function
// throws.
TEST_P(DeviceContract, AHostFunctionThatCallsTheDeviceFails) {
  const Event event(device());
  const Stream stream(device(), "test");
  device().call_host(stream.id(), [&] { device().record(event.id(), stream.id()); });
  expect_misuse("call_host", [&] { device().synchronize(stream.id()); });
}

}  // namespace sluice
