// This header contains the fixture of the device contract (device_contract.h), and two helpers. The
// first helper is an array in page-locked host memory. The second helper is a gate that holds a
// stream back. One thread at a time uses the fixture.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>

#include <sluice/device.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"

namespace sluice {

struct DeviceFactory {
  std::string name;
  // The function returns null if the machine has no such device. The cases are then skipped.
  std::function<std::unique_ptr<Device>(std::uint64_t memory_bytes)> make;
};

// Page-locked host memory. `device` must outlive the array.
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

// A gate holds a stream back until the gate is opened. A gate may be opened twice, or never.
class Gate {
 public:
  ~Gate() { open(); }
  void block(Device& device, StreamId stream) {
    device.call_host(stream, [opened = opened_, reached = reached_] {
      *reached = true;
      reached->notify_all();
      opened.wait();
    });
  }
  // The call blocks until the stream has reached the gate.
  void await_reached() { reached_->wait(false); }
  void open() {
    if (!is_open_) promise_.set_value();
    is_open_ = true;
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> opened_ = promise_.get_future().share();
  std::shared_ptr<std::atomic<bool>> reached_ = std::make_shared<std::atomic<bool>>(false);
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

}  // namespace sluice
