// The device over CUDA against a stand-in for the runtime: the contract, and what happens when the
// GPU fails for good. Runs on machines without a GPU.
#include <gtest/gtest.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/cuda_device.h>
#include "base/aligned_buffer.h"
#include "gpu/cuda/cuda_enqueue.h"
#include "tests/contract/device_contract.h"
#include "tests/gpu/cuda/fake_cuda_faults.h"
#include "tests/gpu/cuda/fake_cuda_log.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"

namespace sluice {
namespace {

INSTANTIATE_TEST_SUITE_P(FakeCuda, DeviceContract,
                         testing::Values(DeviceFactory{
                             "cuda",
                             [](std::uint64_t memory_bytes) -> std::unique_ptr<Device> {
                               return make_cuda_device({.memory_bytes = memory_bytes});
                             }}),
                         device_factory_name);

class FakeCuda : public testing::Test {
 protected:
  ~FakeCuda() override { test::fail_fake_cuda({.status = 0}); }
};

void expect_illegal_access(Device& device, StreamId stream) {
  try {
    device.synchronize(stream);
    ADD_FAILURE() << "no failure was reported";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    EXPECT_NE(std::string(error.what()).find("(700)"), std::string::npos) << error.what();
  }
}

// No wait is endless, whether the runtime still takes callbacks or not.
TEST_F(FakeCuda, AfterAFailureOfTheGpuEveryHostFunctionStillRuns) {
  for (const bool refuses_callbacks : {false, true}) {
    test::fail_fake_cuda({.status = 0});
    const auto device = make_cuda_device({.memory_bytes = 1_MiB});
    std::atomic<int> ran{0};
    {
      const Stream stream(*device, "test");
      const Event event(*device);
      HostArray host(*device, 4096);
      const DeviceBuffer buffer(*device, 4096, "test");
      Gate gate;
      gate.block(*device, stream.id());
      device->call_host(stream.id(), [&ran] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // no thread may leave before
        ++ran;
      });
      test::fail_fake_cuda(
          {.status = cudaErrorIllegalAddress, .refuses_callbacks = refuses_callbacks});
      device->copy(buffer.data(), host.data(), 4096, stream.id());
      device->call_host(stream.id(), [&ran] { ++ran; });
      device->record(event.id(), stream.id());
      device->wait(stream.id(), event.id());
      EXPECT_TRUE(device->is_complete(event.id()));
      gate.open();
      expect_illegal_access(*device, stream.id());
      device->call_host(stream.id(), [&ran] { ++ran; });
    }
    EXPECT_EQ(ran, 3);
  }
}

// As of a kernel that could not be launched.
TEST_F(FakeCuda, AFailureOfTheCallersOwnWorkIsTheDevices) {
  const auto device = make_cuda_device({.memory_bytes = 1_MiB});
  const Stream stream(*device, "test");
  HostArray host(*device, 64);
  const DeviceBuffer buffer(*device, 64, "test");
  host.data()[0] = std::byte{7};
  int launched = 0;
  enqueue_kernel(*device, [&] { ++launched; });
  EXPECT_FALSE(device->has_failed());
  device->fail(Error(ErrorCode::kInternal, "the first"));
  device->fail(Error(ErrorCode::kInternal, "the second"));
  EXPECT_TRUE(device->has_failed());
  enqueue_kernel(*device, [&] { ++launched; });
  EXPECT_EQ(launched, 1) << "a kernel behind the failure";
  device->copy(buffer.data(), host.data(), 64, stream.id());
  try {
    device->synchronize(stream.id());
    ADD_FAILURE() << "no failure was reported";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "the first");
  }
  EXPECT_EQ(buffer.data()[0], std::byte{0}) << "a copy behind the failure";
}

// As PyTorch's allocator does, which shares the GPU with the device.
TEST_F(FakeCuda, CopiesFromAndToGpuMemoryOfOthers) {
  const auto device = make_cuda_device({.memory_bytes = 1_MiB});
  const Stream stream(*device, "test");
  HostArray host(*device, 64);
  const DeviceBuffer buffer(*device, 64, "test");
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 64), cudaSuccess);
  auto* const foreign = static_cast<std::byte*>(memory);
  host.data()[63] = std::byte{7};
  device->copy(foreign, host.data(), 64, stream.id());
  device->copy(buffer.data(), foreign, 64, stream.id());
  device->synchronize(stream.id());
  host.data()[63] = std::byte{0};
  device->copy(foreign, buffer.data(), 64, stream.id());
  device->copy(host.data(), foreign, 64, stream.id());
  device->synchronize(stream.id());
  EXPECT_EQ(host.data()[63], std::byte{7});
  test::log_fake_cuda_calls(true);
  device->fill_zero(foreign, 64, stream.id());
  device->synchronize(stream.id());
  EXPECT_TRUE(std::ranges::any_of(test::take_fake_cuda_calls(), [](const auto& call) {
    return call.kind == test::FakeCudaCall::Kind::kFill;
  })) << "the host cannot write there";
  EXPECT_EQ(foreign[63], std::byte{0});
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

// A copy, and the end of the copy behind it, while a report of the first still runs.
TEST_F(FakeCuda, AReportHoldsUpNothing) {
  const auto device = make_cuda_device({.memory_bytes = 1_MiB});
  HostArray host(*device, 4096);
  const DeviceBuffer buffer(*device, 4096, "test");
  const Stream stream(*device, "test");
  std::promise<void> opened;
  test::log_fake_cuda_calls(true);
  device->copy(buffer.data(), host.data(), 4096, stream.id());
  device->notify(stream.id(), [gate = opened.get_future().share()] { gate.wait(); });
  device->copy(buffer.data(), host.data(), 4096, stream.id());
  device->synchronize(stream.id());
  for (const test::FakeCudaCall& call : test::take_fake_cuda_calls())
    EXPECT_NE(call.kind, test::FakeCudaCall::Kind::kCallback);
  opened.set_value();
}

// The GPU fails between two reports, or the runtime refuses one: all come, in order.
TEST_F(FakeCuda, ReportsOfAStreamKeepTheirOrderWhenTheGpuFails) {
  for (unsigned failing = 0; failing < 6; ++failing) {
    const auto device = make_cuda_device({.memory_bytes = 1_MiB});
    std::vector<unsigned> order;
    {
      const Stream stream(*device, "test");
      Gate gate;
      gate.block(*device, stream.id());
      for (unsigned i = 0; i < 5; ++i) {
        if (i == failing) test::fail_fake_cuda({.status = cudaErrorIllegalAddress});
        device->notify(stream.id(), [&order, i] { order.push_back(i); });
      }
      gate.open();
    }
    EXPECT_EQ(order, (std::vector<unsigned>{0, 1, 2, 3, 4})) << "failed at " << failing;
    test::fail_fake_cuda({.status = 0});
  }
}

constexpr unsigned kHostCalls = 5;
const std::vector<unsigned> kOrderOfHostCalls = {0, 1, 2, 3, 4};

// In which order the host functions of a busy stream run. `before` is called before each call.
std::vector<unsigned> order_of_host_calls(CudaDevice& device,
                                          const std::function<void(unsigned call)>& before) {
  std::mutex mutex;
  std::vector<unsigned> order;
  {
    const Stream stream(device, "test");
    Gate gate;
    gate.block(device, stream.id());
    for (unsigned i = 0; i < kHostCalls; ++i) {
      before(i);
      device.call_host(stream.id(), [&, i] {
        const std::scoped_lock lock(mutex);
        order.push_back(i);
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // time for what runs too early
    gate.open();
  }
  return order;
}

// Whichever of the calls the runtime refuses: those before it may still be with the runtime, and
// the callers rely on the order of completions.
TEST_F(FakeCuda, HostFunctionsOfAStreamKeepTheirOrderWhicheverAreRefused) {
  for (unsigned refused = 0; refused < 1u << kHostCalls; ++refused) {
    const auto device = make_cuda_device({.memory_bytes = 1_MiB});
    const auto order = order_of_host_calls(*device, [refused](unsigned call) {
      if ((refused >> call & 1) != 0) test::refuse_next_fake_cuda_callback();
    });
    EXPECT_EQ(order, kOrderOfHostCalls) << "refused: " << refused;
  }
}

// The GPU fails for good between two calls.
TEST_F(FakeCuda, HostFunctionsOfAStreamKeepTheirOrderWhenTheGpuFails) {
  for (const bool refuses_callbacks : {false, true}) {
    for (unsigned failing = 0; failing < kHostCalls; ++failing) {
      const auto device = make_cuda_device({.memory_bytes = 1_MiB});
      const auto order = order_of_host_calls(*device, [&](unsigned call) {
        if (call == failing)
          test::fail_fake_cuda(
              {.status = cudaErrorIllegalAddress, .refuses_callbacks = refuses_callbacks});
      });
      EXPECT_EQ(order, kOrderOfHostCalls) << "failed at " << failing;
      test::fail_fake_cuda({.status = 0});
    }
  }
}

TEST_F(FakeCuda, MemoryThatCannotBeHadAfterAllIsNotInTheBooks) {
  const auto device = make_cuda_device({.memory_bytes = test::kFakeCudaMemoryBytes});
  EXPECT_THROW(device->allocate(test::kFakeCudaMemoryBytes, "all of it"), Error);
  EXPECT_EQ(device->allocated_bytes(), 0u);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "a kernel launched now would look failed";
}

TEST_F(FakeCuda, MoreThanTheGpuHasIsRefused) {
  try {
    (void)make_cuda_device({.memory_bytes = test::kFakeCudaMemoryBytes + 1});
    FAIL() << "the GPU has less";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_NE(std::string(error.what()).find("memory.device"), std::string::npos) << error.what();
  }
}

// The runtime has one number for both.
TEST_F(FakeCuda, ADriverThatIsTooOldIsToldFromNone) {
  const auto why = [](int driver) {
    test::set_fake_cuda_driver(driver);
    test::arm_fake_cuda_fault(
        {.function = "cudaGetDeviceCount", .at_call = 1, .status = cudaErrorInsufficientDriver});
    const std::string said = why_no_cuda_device();
    (void)test::disarm_fake_cuda_fault();
    test::set_fake_cuda_driver(CUDART_VERSION);
    return said;
  };
  EXPECT_EQ(why(0),
            "no usable GPU: there is no NVIDIA driver, or this process cannot load it; nvidia-smi "
            "tells more");
  EXPECT_NE(why(11040).find("the NVIDIA driver is for CUDA 11.4, and this program needs CUDA " +
                            std::to_string(CUDART_VERSION / 1000) + ".0"),
            std::string::npos);
}

TEST_F(FakeCuda, AGpuThatThereIsNotIsNotDescribed) {
  EXPECT_NE(why_no_cuda_device(99), "");
  EXPECT_THROW((void)describe_cuda_device(99), Error);
  EXPECT_NE(describe_cuda_device(1).find("fake GPU"), std::string::npos);
}

TEST_F(FakeCuda, NoMoreIsFreeThanOtherProcessesHaveLeft) {
  const auto device = make_cuda_device({.memory_bytes = test::kFakeCudaMemoryBytes});
  const auto other = make_cuda_device({.memory_bytes = test::kFakeCudaMemoryBytes});
  const std::uint64_t before = device->free_bytes();
  const DeviceBuffer taken(*other, 100_MiB, "test");
  EXPECT_LE(device->free_bytes(), before - 100_MiB);
  EXPECT_EQ(device->capacity_bytes(), test::kFakeCudaMemoryBytes);
  EXPECT_EQ(device->allocated_bytes(), 0u);
}

// Others may take memory, and code that is loaded does, until the engine asks.
TEST_F(FakeCuda, CapacityOfAllThatIsFreeIsReadAgain) {
  const auto all = make_cuda_device();
  const auto some = make_cuda_device({.memory_bytes = 64_MiB});
  const std::uint64_t before = all->capacity_bytes();
  const DeviceBuffer own(*all, 8_MiB, "test");
  EXPECT_NEAR(static_cast<double>(all->capacity_bytes()), static_cast<double>(before), 8192.0);
  void* others = nullptr;
  ASSERT_EQ(cudaMalloc(&others, 100_MiB), cudaSuccess);
  EXPECT_LE(all->capacity_bytes(), before - 100_MiB);
  EXPECT_GE(all->capacity_bytes(), before - 101_MiB);
  EXPECT_EQ(some->capacity_bytes(), 64_MiB);
  EXPECT_EQ(cudaFree(others), cudaSuccess);
}

TEST_F(FakeCuda, PagesAreRegisteredInWholeAndGivenBack) {
  const auto device = make_cuda_device({.memory_bytes = 1_MiB});
  {
    const HostArray host(*device, 4097);
    EXPECT_EQ(test::fake_cuda_registered_bytes(), 8192u);
  }
  EXPECT_EQ(test::fake_cuda_registered_bytes(), 0u);
}

TEST_F(FakeCuda, MemoryThatBeginsWithinAPageIsAMistake) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto device = make_cuda_device({.memory_bytes = 1_MiB});
  AlignedBuffer host(8192, "a test");
  EXPECT_DEATH(device->register_host_memory(host.span().subspan(64)), "begins at a page");
}

TEST_F(FakeCuda, WaitingForAnEventLeavesNoErrorBehind) {
  const auto device = make_cuda_device({.memory_bytes = 1_MiB});
  const Stream stream(*device, "test");
  const Event event(*device);
  Gate gate;
  gate.block(*device, stream.id());
  device->record(event.id(), stream.id());
  EXPECT_FALSE(device->is_complete(event.id()));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// A call of `body` on a thread that has never chosen a GPU.
template <class Body>
void on_fresh_thread(const Body& body) {
  std::thread(body).join();
}

// Every function of Device, on threads that have never chosen a GPU, as the engine's have not: rank
// 7's must not take half a gigabyte of rank 0's GPU.
TEST_F(FakeCuda, NoCallMakesAContextOnAnotherGpu) {
  (void)test::take_fake_cuda_contexts();
  std::unique_ptr<CudaDevice> device;
  StreamId stream{};
  EventId events[2] = {};
  std::byte* memory = nullptr;
  AlignedBuffer host(4096, "a test");
  std::byte other[64] = {};
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"why_no_cuda_device", [&] { (void)why_no_cuda_device(2); }},
      {"describe_cuda_device", [&] { (void)describe_cuda_device(2); }},
      {"make_cuda_device",
       [&] { device = make_cuda_device({.ordinal = 2, .memory_bytes = 1_MiB}); }},
      {"create_stream", [&] { stream = device->create_stream("test", StreamPriority::kHigh); }},
      {"create_event", [&] { events[0] = device->create_event(); }},
      {"create_event", [&] { events[1] = device->create_event(); }},
      {"allocate", [&] { memory = device->allocate(4096, "test"); }},
      {"register_host_memory", [&] { device->register_host_memory(host.span()); }},
      {"record", [&] { device->record(events[0], stream); }},
      {"wait", [&] { device->wait(stream, events[0]); }},
      {"copy", [&] { device->copy(memory, host.data(), 4096, stream); }},
      {"copy from host to host", [&] { device->copy(other, host.data(), 64, stream); }},
      {"fill_zero", [&] { device->fill_zero(memory, 4096, stream); }},
      {"call_host", [&] { device->call_host(stream, [] {}); }},
      {"notify", [&] { device->notify(stream, [] {}); }},
      {"record", [&] { device->record(events[1], stream); }},
      {"synchronize an event", [&] { device->synchronize(events[1]); }},
      {"is_complete", [&] { (void)device->is_complete(events[1]); }},
      {"elapsed_ns", [&] { (void)device->elapsed_ns(events[0], events[1]); }},
      {"synchronize a stream", [&] { device->synchronize(stream); }},
      {"unregister_host_memory", [&] { device->unregister_host_memory(host.span()); }},
      {"free", [&] { device->free(memory); }},
      {"destroy_event", [&] { device->destroy_event(events[0]); }},
      {"destroy_event", [&] { device->destroy_event(events[1]); }},
      {"destroy_stream", [&] { device->destroy_stream(stream); }},
      {"the destructor", [&] { device.reset(); }},
  };
  for (const auto& [name, call] : calls) {
    on_fresh_thread(call);
    for (const int gpu : test::take_fake_cuda_contexts())
      EXPECT_EQ(gpu, 2) << name << " made a context there";
  }
}

// An application that computes on another GPU finds it current after every call.
TEST_F(FakeCuda, AThreadThatUsesAnotherGpuKeepsIt) {
  on_fresh_thread([] {
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    const auto device = make_cuda_device({.ordinal = 2, .memory_bytes = 1_MiB});
    const Stream stream(*device, "test");
    device->call_host(stream.id(), [] {});
    device->synchronize(stream.id());
    int current = -1;
    EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    EXPECT_EQ(current, 1);
  });
}

TEST_F(FakeCuda, GivesAllItsMemoryBack) {
  const std::uint64_t before = test::fake_cuda_allocated_bytes();
  const auto device = make_cuda_device({.memory_bytes = 64_MiB});
  {
    const DeviceBuffer buffer(*device, 3_MiB + 1, "test");
    EXPECT_GE(test::fake_cuda_allocated_bytes(), before + 3_MiB);
  }
  EXPECT_EQ(test::fake_cuda_allocated_bytes(), before);
}

}  // namespace
}  // namespace sluice
