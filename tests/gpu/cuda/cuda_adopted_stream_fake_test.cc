// Streams of others that the CUDA device adopts, over the stand-in for the runtime: the contract of
// Device with nothing but such streams, who destroys them, and which are refused.
#include <gtest/gtest.h>

#include <cuda_runtime.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <sluice/cuda_device.h>
#include "tests/contract/device_contract.h"
#include "tests/gpu/cuda/fake_cuda_faults.h"
#include "tests/gpu/cuda/fake_cuda_log.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"
#include "tests/support/expect_error.h"
#include "tests/support/forwarding_device.h"

namespace sluice::test {
namespace {

// A stream of the application's.
class OwnStream {
 public:
  explicit OwnStream(int gpu = 0) {
    EXPECT_EQ(cudaSetDevice(gpu), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() { EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess); }

  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// The CUDA device, all of whose streams the application has made.
class AdoptingDevice final : public DeviceForwarder<CudaDevice> {
 public:
  using DeviceForwarder::DeviceForwarder;

  int ordinal() const override { return inner().ordinal(); }
  void* native_stream(StreamId stream) const override { return inner().native_stream(stream); }
  Stream adopt_stream(void* native) override { return inner().adopt_stream(native); }
  void fail(const Error& failure) noexcept override { inner().fail(failure); }
  bool has_failed() const noexcept override { return inner().has_failed(); }
  StreamId create_stream(std::string_view, StreamPriority) override {
    Pair made;
    made.own = std::make_unique<OwnStream>();
    made.adopted = inner().adopt_stream(made.own->get());
    const std::scoped_lock lock(mutex_);
    const StreamId id = made.adopted.id();
    streams_.emplace(id, std::move(made));
    return id;
  }
  void destroy_stream(StreamId stream) noexcept override {
    Pair leaving;
    const std::scoped_lock lock(mutex_);
    leaving = std::move(streams_.extract(stream).mapped());
  }

 private:
  struct Pair {
    std::unique_ptr<OwnStream> own;
    Stream adopted;  // goes first
  };
  std::mutex mutex_;
  std::unordered_map<StreamId, Pair> streams_;  // guarded by mutex_
};

INSTANTIATE_TEST_SUITE_P(AdoptedStreams, DeviceContract,
                         testing::Values(DeviceFactory{
                             "cuda",
                             [](std::uint64_t memory_bytes) -> std::unique_ptr<Device> {
                               return std::make_unique<AdoptingDevice>(
                                   make_cuda_device({.memory_bytes = memory_bytes}));
                             }}),
                         device_factory_name);

class AdoptedStream : public testing::Test {
 protected:
  ~AdoptedStream() override { fake_cuda_default_stream() = nullptr; }

  const std::unique_ptr<CudaDevice> device_ = make_cuda_device({.memory_bytes = 1_MiB});
};

// The owner's work and the device's go in the order in which they were enqueued.
TEST_F(AdoptedStream, ItsWorkIsInOrderWithItsOwners) {
  const OwnStream own;
  const Stream adopted = device_->adopt_stream(own.get());
  EXPECT_EQ(adopted.device(), device_.get());
  EXPECT_EQ(device_->native_stream(adopted.id()), own.get());
  std::vector<int> order;  // of one stream
  Gate gate;
  gate.block(*device_, adopted.id());
  launch_fake_cuda(own.get(), [&order] { order.push_back(1); });
  device_->call_host(adopted.id(), [&order] { order.push_back(2); });
  launch_fake_cuda(own.get(), [&order] { order.push_back(3); });
  gate.open();
  device_->synchronize(adopted.id());
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

// The Stream waits for everything that is on it, also for the owner's work, and leaves it to its
// owner, who goes on.
TEST_F(AdoptedStream, BelongsToItsOwner) {
  const OwnStream own;
  std::atomic<int> ran = 0;
  for (int round = 1; round <= 2; ++round) {
    Stream adopted = device_->adopt_stream(own.get());
    Gate gate;
    gate.block(*device_, adopted.id());
    launch_fake_cuda(own.get(), [&ran] { ++ran; });
    gate.open();
    adopted = Stream();
    EXPECT_EQ(ran, round);
  }
  launch_fake_cuda(own.get(), [&ran] { ++ran; });
  EXPECT_EQ(cudaStreamSynchronize(own.get()), cudaSuccess);
  EXPECT_EQ(ran, 3);
}

TEST_F(AdoptedStream, StreamsThatCannotBeAreRefused) {
  const OwnStream own, elsewhere(/*gpu=*/1);
  const Stream adopted = device_->adopt_stream(own.get());
  const Stream made(*device_, "test");
  for (void* const known : {static_cast<void*>(own.get()), device_->native_stream(made.id())}) {
    const std::string words =
        expect_error(ErrorCode::kInvalidArgument, [&] { (void)device_->adopt_stream(known); });
    EXPECT_NE(words.find("already"), std::string::npos) << words;
  }
  const std::string words = expect_error(ErrorCode::kInvalidArgument,
                                         [&] { (void)device_->adopt_stream(elsewhere.get()); });
  EXPECT_NE(words.find("give a cudaStream_t of this GPU"), std::string::npos) << words;
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "a kernel launched now would look failed";
  device_->synchronize(adopted.id());  // none of it has changed anything
}

// PyTorch computes there, unless the program chooses another stream.
TEST_F(AdoptedStream, MayBeTheDefaultStream) {
  const OwnStream default_stream;
  fake_cuda_default_stream() = default_stream.get();
  const Stream adopted = device_->adopt_stream(nullptr);
  EXPECT_EQ(device_->native_stream(adopted.id()), nullptr);
  HostArray host(*device_, 4096);
  const DeviceBuffer buffer(*device_, 4096, "test");
  log_fake_cuda_calls(true);
  device_->copy(buffer.data(), host.data(), 4096, adopted.id());
  device_->synchronize(adopted.id());
  int copies = 0;
  for (const FakeCudaCall& call : take_fake_cuda_calls()) {
    if (call.kind != FakeCudaCall::Kind::kCopyUp) continue;
    EXPECT_EQ(call.stream, 0u);
    ++copies;
  }
  log_fake_cuda_calls(false);
  EXPECT_EQ(copies, 1);
}

}  // namespace
}  // namespace sluice::test
