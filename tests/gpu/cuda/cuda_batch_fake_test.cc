// Several copies in one call, over the stand-in for the CUDA runtime: with a driver that has the
// call, with one that does not have it, and with one that refuses it.
#include <gtest/gtest.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <sluice/cuda_device.h>
#include "gpu/device/copy_runs.h"
#include "tests/contract/device_contract_fixture.h"
#include "tests/gpu/cuda/fake_cuda_faults.h"
#include "tests/gpu/cuda/fake_cuda_log.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"

namespace sluice {
namespace {

using test::FakeCudaBatches;
using test::FakeCudaCall;

constexpr std::uint64_t kPieceBytes = 4_KiB;
constexpr std::uint64_t kPieces = 5;

class CudaBatchFake : public testing::Test {
 protected:
  ~CudaBatchFake() override {
    test::set_fake_cuda_batches(FakeCudaBatches::kTaken);
    (void)test::disarm_fake_cuda_fault();
  }

  // A machine whose driver answers so.
  struct Machine {
    explicit Machine(FakeCudaBatches batches, int ordinal = 0) {
      test::set_fake_cuda_batches(batches);
      device = make_cuda_device({.ordinal = ordinal, .memory_bytes = 1_MiB});
      stream = Stream(*device, "test");
      memory = DeviceBuffer(*device, 2 * kPieces * kPieceBytes, "test");
    }
    std::unique_ptr<CudaDevice> device;
    Stream stream;
    DeviceBuffer memory;
  };

  // Copies that do not adjoin. Returns the copies in the runtime's log.
  static std::vector<FakeCudaCall> copy_apart(Machine& machine, const HostArray& host) {
    test::log_fake_cuda_calls(true);
    CopyRuns runs(*machine.device, machine.stream.id());
    for (std::uint64_t i = 0; i < kPieces; ++i)
      runs.add(machine.memory.data() + 2 * i * kPieceBytes, host.data() + i * kPieceBytes,
               kPieceBytes);
    runs.flush();
    std::vector<FakeCudaCall> calls = test::take_fake_cuda_calls();
    std::erase_if(calls, [](const auto& call) { return call.kind != FakeCudaCall::Kind::kCopyUp; });
    return calls;
  }

  static void expect_copied(Machine& machine, HostArray& host) {
    HostArray back(*machine.device, host.size_bytes());
    for (std::uint64_t i = 0; i < kPieces; ++i)
      machine.device->copy(back.data() + i * kPieceBytes,
                           machine.memory.data() + 2 * i * kPieceBytes, kPieceBytes,
                           machine.stream.id());
    machine.device->synchronize(machine.stream.id());
    EXPECT_EQ(std::memcmp(back.data(), host.data(), kPieces * kPieceBytes), 0);
  }
};

TEST_F(CudaBatchFake, CopiesThatLieApartAreOneCallWhereTheDriverHasIt) {
  Machine machine(FakeCudaBatches::kTaken);
  HostArray host(*machine.device, kPieces * kPieceBytes);
  host.fill_pattern(1);
  const std::vector<FakeCudaCall> copies = copy_apart(machine, host);
  EXPECT_EQ(copies.size(), kPieces);
  EXPECT_EQ(std::ranges::count(copies, false, &FakeCudaCall::is_continued), 1);
  expect_copied(machine, host);
}

TEST_F(CudaBatchFake, AnOlderDriverTakesThemOneByOne) {
  Machine machine(FakeCudaBatches::kUnknown);
  HostArray host(*machine.device, kPieces * kPieceBytes);
  host.fill_pattern(2);
  const std::vector<FakeCudaCall> copies = copy_apart(machine, host);
  EXPECT_EQ(std::ranges::count(copies, false, &FakeCudaCall::is_continued), kPieces);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "the look-up leaves no error behind";
  expect_copied(machine, host);
}

// The driver refuses batches there, as an invalid value.
TEST_F(CudaBatchFake, TheDefaultStreamTakesThemOneByOne) {
  Machine machine(FakeCudaBatches::kTaken);
  const Stream own(*machine.device, "the default stream");
  test::fake_cuda_default_stream() = machine.device->native_stream(own.id());
  machine.stream = machine.device->adopt_stream(nullptr);
  HostArray host(*machine.device, kPieces * kPieceBytes);
  host.fill_pattern(5);
  const std::vector<FakeCudaCall> copies = copy_apart(machine, host);
  EXPECT_EQ(std::ranges::count(copies, false, &FakeCudaCall::is_continued), kPieces);
  expect_copied(machine, host);
  machine.stream = Stream();
  test::fake_cuda_default_stream() = nullptr;
}

TEST_F(CudaBatchFake, ADriverThatRefusesIsAskedOnce) {
  Machine machine(FakeCudaBatches::kRefused);
  HostArray host(*machine.device, kPieces * kPieceBytes);
  test::arm_fake_cuda_fault({.function = "cuMemcpyBatchAsync"});
  for (const std::uint32_t pattern : {3u, 4u}) {
    host.fill_pattern(pattern);
    const std::vector<FakeCudaCall> copies = copy_apart(machine, host);
    EXPECT_EQ(std::ranges::count(copies, false, &FakeCudaCall::is_continued), kPieces);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    expect_copied(machine, host);
  }
  EXPECT_EQ(test::disarm_fake_cuda_fault().calls, 1u);
}

TEST_F(CudaBatchFake, ACallThatFailsIsTheDevicesFailure) {
  Machine machine(FakeCudaBatches::kTaken);
  HostArray host(*machine.device, kPieces * kPieceBytes);
  test::arm_fake_cuda_fault(
      {.function = "cuMemcpyBatchAsync", .at_call = 1, .status = cudaErrorInvalidValue});
  EXPECT_TRUE(copy_apart(machine, host).empty());
  try {
    machine.device->synchronize(machine.stream.id());
    ADD_FAILURE() << "no failure was reported";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("(1)"), std::string::npos) << error.what();
  }
}

// The driver's function takes the thread's context. It would copy on the wrong GPU.
TEST_F(CudaBatchFake, NothingIsCopiedWhereTheGpuCannotBeChosen) {
  for (const char* const function : {"cudaGetDevice", "cudaSetDevice"}) {
    SCOPED_TRACE(function);
    Machine machine(FakeCudaBatches::kTaken, /*ordinal=*/1);
    const HostArray host(*machine.device, kPieces * kPieceBytes);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    test::arm_fake_cuda_fault(
        {.function = function, .at_call = 1, .status = cudaErrorDevicesUnavailable});
    EXPECT_TRUE(copy_apart(machine, host).empty());
    EXPECT_EQ(test::disarm_fake_cuda_fault().failed_call, function);
    try {
      machine.device->synchronize(machine.stream.id());
      ADD_FAILURE() << "no failure was reported";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("(46)"), std::string::npos) << error.what();
    }
  }
}

// A run of adjacent copies stays one copy, whatever the driver has.
TEST_F(CudaBatchFake, AdjacentCopiesAreOneCopy) {
  for (const auto batches :
       {FakeCudaBatches::kTaken, FakeCudaBatches::kUnknown, FakeCudaBatches::kRefused}) {
    Machine machine(batches);
    HostArray host(*machine.device, kPieces * kPieceBytes);
    test::log_fake_cuda_calls(true);
    CopyRuns runs(*machine.device, machine.stream.id());
    for (std::uint64_t i = 0; i < kPieces; ++i)
      runs.add(machine.memory.data() + i * kPieceBytes, host.data() + i * kPieceBytes, kPieceBytes);
    runs.flush();
    runs.flush();
    const std::vector<FakeCudaCall> calls = test::take_fake_cuda_calls();
    ASSERT_EQ(calls.size(), 1u);
    EXPECT_EQ(calls.front().size_bytes, kPieces * kPieceBytes);
    machine.device->synchronize(machine.stream.id());
  }
}

}  // namespace
}  // namespace sluice
