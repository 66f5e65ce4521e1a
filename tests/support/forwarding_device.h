// Devices that forward every call to another device. With these devices, a test can change a single
// function. ForwardingDevice forwards calls to a HostDevice. DeviceForwarder forwards calls to any
// Device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include <sluice/host_device.h>

namespace sluice::test {

template <class Interface>
class DeviceForwarder : public Interface {
 public:
  explicit DeviceForwarder(std::unique_ptr<Interface> inner) : inner_(std::move(inner)) {}

  std::string_view name() const override { return inner_->name(); }
  bool has_own_memory() const override { return inner_->has_own_memory(); }
  std::byte* allocate(std::uint64_t size_bytes, std::string_view purpose) override {
    return inner_->allocate(size_bytes, purpose);
  }
  void free(std::byte* memory) noexcept override { inner_->free(memory); }
  std::uint64_t capacity_bytes() const override { return inner_->capacity_bytes(); }
  std::uint64_t allocated_bytes() const override { return inner_->allocated_bytes(); }
  std::uint64_t free_bytes() const override { return inner_->free_bytes(); }
  void register_host_memory(std::span<std::byte> memory) override {
    inner_->register_host_memory(memory);
  }
  void unregister_host_memory(std::span<std::byte> memory) noexcept override {
    inner_->unregister_host_memory(memory);
  }
  StreamId create_stream(std::string_view name, StreamPriority priority) override {
    return inner_->create_stream(name, priority);
  }
  void destroy_stream(StreamId stream) noexcept override { inner_->destroy_stream(stream); }
  EventId create_event() override { return inner_->create_event(); }
  void destroy_event(EventId event) noexcept override { inner_->destroy_event(event); }
  void record(EventId event, StreamId stream) override { inner_->record(event, stream); }
  void wait(StreamId stream, EventId event) override { inner_->wait(stream, event); }
  bool is_complete(EventId event) const override { return inner_->is_complete(event); }
  void synchronize(EventId event) override { inner_->synchronize(event); }
  void synchronize(StreamId stream) override { inner_->synchronize(stream); }
  std::int64_t elapsed_ns(EventId begin, EventId end) const override {
    return inner_->elapsed_ns(begin, end);
  }
  void copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
            StreamId stream) override {
    inner_->copy(target, source, size_bytes, stream);
  }
  void fill_zero(std::byte* target, std::uint64_t size_bytes, StreamId stream) override {
    inner_->fill_zero(target, size_bytes, stream);
  }
  void call_host(StreamId stream, std::function<void()> function) override {
    inner_->call_host(stream, std::move(function));
  }
  void notify(StreamId stream, std::function<void()> function) override {
    inner_->notify(stream, std::move(function));
  }

 protected:
  Interface& inner() const { return *inner_; }

 private:
  std::unique_ptr<Interface> inner_;
};

class ForwardingDevice : public DeviceForwarder<HostDevice> {
 public:
  using DeviceForwarder::DeviceForwarder;

  void launch(StreamId stream, std::function<void()> work) override {
    inner().launch(stream, std::move(work));
  }
  void occupy(StreamId stream, std::uint64_t duration_ns) override {
    inner().occupy(stream, duration_ns);
  }
};

}  // namespace sluice::test
