// Each call of the CUDA runtime fails once, over the stand-in, from the making of the device to the
// state's reading: an error that names the failure, or the right bits. Never a hang, never a crash,
// never a silent wrong, and nothing is left behind. Runs without a GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <sluice/cuda_device.h>
#include <sluice/detached_optimizer.h>
#include <sluice/engine.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "engine/store/tiers.h"
#include "tests/gpu/cuda/fake_cuda_faults.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"
#include "tests/support/campaign.h"
#include "tests/support/expect_error.h"
#include "tests/support/hang_guard.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"
#include "tests/support/typed_elements.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kSteps = 2;

// Two small units of two blocks: few calls, and each kind of them.
ModelSpec two_units() {
  ModelSpec model;
  for (std::uint32_t unit = 0; unit < 2; ++unit) {
    const std::string name = "h." + std::to_string(unit);
    model.units.push_back({name, {{.name = name + ".fc", .shape = {50 + 30 * unit, 100}}}});
    model.forward_order.push_back(UnitId{unit});
    model.backward_order.insert(model.backward_order.begin(), UnitId{unit});
  }
  return validated(model);
}

float gradient_of(std::uint64_t step, std::uint32_t unit, std::uint64_t i) {
  return static_cast<float>((i * 2654435761u + unit * 977u + step * 131u) % 2001) * 0x1p-12f - 0.2f;
}

// Gradients as computation would leave them on the device.
void bring_gradient(Device& device, StreamId stream, std::byte* target, std::uint64_t step,
                    std::uint32_t unit, std::uint64_t count) {
  AlignedBuffer source(count * sizeof(float), "a gradient");
  for (std::uint64_t i = 0; i < count; ++i)
    save(DType::kFp32, source.data(), i, gradient_of(step, unit, i));
  device.register_host_memory(source.span());
  try {
    device.copy(target, source.data(), count * sizeof(float), stream);
    device.synchronize(stream);
  } catch (const Error&) {
    device.unregister_host_memory(source.span());
    throw;
  }
  device.unregister_host_memory(source.span());
}

StateBytes train(const Config& config) {
  const auto device = make_cuda_device({.ordinal = 1, .memory_bytes = 16_MiB});
  const ModelSpec model = two_units();
  Engine engine(config, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  for (std::uint64_t number = 0; number < kSteps; ++number) {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    for (const UnitId unit : model.forward_order) (void)step.acquire(unit, Pass::kForward, stream);
    for (const UnitId unit : model.backward_order) {
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      bring_gradient(*device, stream.id(), lease.gradient(0), number, index_of(unit),
                     layout_of(engine).tensors_of(unit)[0].element_count);
    }
    (void)step.finish();
  }
  {
    Inference inference = engine.begin_inference();
    for (const UnitId unit : model.forward_order) (void)inference.acquire(unit, stream);
  }
  return read_state(engine);
}

// Memory of the GPU that the application has allocated itself, as PyTorch does.
class OwnMemory {
 public:
  explicit OwnMemory(std::uint64_t size_bytes) {
    EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&memory_, size_bytes), cudaSuccess);
  }
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;
  ~OwnMemory() { (void)cudaFree(memory_); }
  void* data() const { return memory_; }

 private:
  void* memory_ = nullptr;
};

// Two updates of a tensor of two blocks, whose parameter and gradient are in the application's own
// memory of the GPU.
StateBytes train_detached(const Config& config) {
  constexpr std::uint64_t kElements = 5000;
  static const OwnMemory parameter(kElements * sizeof(float));
  static const OwnMemory gradient(kElements * sizeof(float));
  // On the stand-in's GPU, memory is the host's.
  auto* const values = static_cast<float*>(parameter.data());
  for (std::uint64_t i = 0; i < kElements; ++i) {
    values[i] = gradient_of(1, 0, i);
    static_cast<float*>(gradient.data())[i] = gradient_of(2, 0, i);
  }
  const auto device = make_cuda_device({.ordinal = 1, .memory_bytes = 1_MiB});
  DetachedOptimizer optimizer(
      config, {{.name = "weight", .element_count = kElements, .is_on_device = true}}, *device);
  const Stream stream(*device, "compute");
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    const DetachedUpdate update{.tensor = 0,
                                .parameter = parameter.data(),
                                .gradient = gradient.data(),
                                .step = step,
                                .learning_rate = 1e-2,
                                .adam = {}};
    optimizer.begin({&update, 1}, stream.id());
    optimizer.wait(0);
  }
  std::vector<float> all(values, values + kElements);
  all.resize(3 * kElements);
  optimizer.read(0, StateKind::kExpAvg, 0, std::span(all).subspan(kElements, kElements));
  optimizer.read(0, StateKind::kExpAvgSq, 0, std::span(all).subspan(2 * kElements));
  const std::span<const std::byte> bytes = std::as_bytes(std::span(all));
  return StateBytes(bytes.begin(), bytes.end());
}

struct Placement {
  std::string name;
  std::function<void(Config&)> choose;
  StateBytes (*run)(const Config&) = train;
};

std::vector<Placement> placements() {
  return {{"host",
           [](Config& config) {
             config.placement.parameters = config.placement.optimizer = TierChoice::kHost;
           }},
          {"nvme",
           [](Config& config) {
             config.placement.parameters = config.placement.optimizer = TierChoice::kNvme;
           }},
          {"device", [](Config& config) { config.placement.optimizer = TierChoice::kDevice; }},
          {"streamed",
           [](Config& config) {
             config.placement.parameters = config.placement.optimizer = TierChoice::kHost;
             config.optimizer.update_on = UpdateProcessor::kDevice;
           }},
          {"detached", [](Config& config) { config.placement.optimizer = TierChoice::kNvme; },
           train_detached}};
}

// The cases of a test, counted.
struct Outcome {
  std::map<std::string, unsigned> failed_calls;  // how often, by function
  unsigned cases = 0;
  unsigned errors = 0;
};

class CudaFaults : public testing::TestWithParam<Placement> {
 protected:
  ~CudaFaults() override { (void)disarm_fake_cuda_fault(); }

  Config config(const std::string& folder) const {
    Config made = toy_config(folder);
    made.threads = 1;
    made.memory.device_bytes = 2_MiB;
    GetParam().choose(made);
    return made;
  }

  StateBytes run() const { return GetParam().run(config(folder_.path())); }

  // Lets calls fail that are spread over a run, each in a run of its own: every call, if the
  // campaign has as many cases. Otherwise the date says where the first one is, so that other days
  // bring other calls.
  void fail_spread(FakeCudaFault fault, std::uint64_t default_cases, Outcome& outcome) {
    const Campaign chosen = campaign(default_cases);
    ASSERT_GT(chosen.cases, 0u);
    const std::uint64_t calls = calls_of_run(fault.function);
    ASSERT_GT(calls, 0u) << "no call to fail";
    const std::uint64_t stride = div_ceil(calls, chosen.cases);
    const std::uint64_t seed = seeds_of({.first_seed = chosen.first_seed, .cases = 1}).back();
    const Outcome before = outcome;
    bool has_failed = true;  // a run may have more calls than the one that was counted
    for (fault.at_call = 1 + seed % stride;
         (fault.at_call <= calls || (stride == 1 && has_failed)) && !HasFailure();
         fault.at_call += stride)
      has_failed = fail_one(fault, outcome);
    // A row of docs/results/reliability.md.
    fmt::print("figure: | {} | {}{} | {} | {} | {} |\n", GetParam().name,
               fault.function.empty() ? "any but cudaEventQuery" : fault.function,
               !fault.is_lasting         ? ""
               : fault.refuses_callbacks ? ", for good"
                                         : ", for good, with callbacks",
               calls, outcome.cases - before.cases, outcome.errors - before.errors);
  }

  // Lets one call fail, in a run of its own. Returns whether the run has had this call.
  bool fail_one(const FakeCudaFault& fault, Outcome& outcome) {
    const std::string what = fmt::format("{}, {} {}{}", GetParam().name,
                                         fault.function.empty() ? "call" : fault.function,
                                         fault.at_call, fault.is_lasting ? ", for good" : "");
    SCOPED_TRACE(what);
    const HangGuard guard(what);
    arm_fake_cuda_fault(fault);
    bool is_error = false;
    std::string said;
    try {
      EXPECT_TRUE(run() == expected_) << "a silent wrong";
    } catch (const Error& error) {
      is_error = true;
      said = error.what();
      // By its number, by CUDA's text for it, or because no GPU could be had at all.
      EXPECT_TRUE(said.find("(" + std::to_string(fault.status) + ")") != std::string::npos ||
                  said.find("an error of the fake runtime") != std::string::npos)
          << said;
    }
    const FakeCudaFaultReport report = disarm_fake_cuda_fault();
    if (report.failed_call.empty()) {
      EXPECT_FALSE(is_error) << "nothing had failed: " << said;
      return false;
    }
    ++outcome.cases;
    ++outcome.failed_calls[report.failed_call];
    outcome.errors += is_error ? 1 : 0;
    EXPECT_EQ(fake_cuda_registered_bytes(), 0u) << report.failed_call;
    EXPECT_EQ(fake_cuda_allocated_bytes(), allocated_bytes_) << report.failed_call;
    EXPECT_EQ(fake_cuda_objects(), objects_) << report.failed_call << ": streams and events";
    return true;
  }

 private:
  // A run in which nothing fails. Runs differ by a few calls, and by many cudaEventQuery.
  std::uint64_t calls_of_run(const std::string& function) {
    arm_fake_cuda_fault({.function = function});
    EXPECT_TRUE(run() == expected_);
    return disarm_fake_cuda_fault().calls;
  }

  TempDirectory folder_;
  StateBytes expected_ = run();
  std::uint64_t allocated_bytes_ = fake_cuda_allocated_bytes();
  std::uint64_t objects_ = fake_cuda_objects();
};

// The first call of each function, and calls all over the run; the GPU goes on working. A run has
// 200 to 1,050 calls, so with --slow of tools/test.sh each of them fails once, here and below.
TEST_P(CudaFaults, ACallThatFailsOnceIsAnErrorOrDoesNoHarm) {
  Outcome outcome;
  std::vector<std::string> functions{
      "cudaGetDevice",      "cudaMemGetInfo",       "cudaHostRegister",
      "cudaHostUnregister", "cudaStreamDestroy",    "cudaEventDestroy",
      "cudaEventRecord",    "cudaStreamWaitEvent",  "cudaEventCreateWithFlags",
      "cudaMemcpyAsync",    "cudaEventSynchronize", "cudaStreamCreateWithPriority",
      "cudaGetDeviceCount", "cudaSetDevice"};
  if (GetParam().name == "detached") {
    functions.emplace_back("cudaPointerGetAttributes");
  } else {
    functions.insert(functions.end(), {"cudaMalloc", "cudaFree", "cudaMemsetAsync"});
  }
  if (GetParam().name == "device") functions.emplace_back("cudaLaunchKernel");
  if (GetParam().name == "detached") {
    // A copy whose ends are not known is no copy on the host.
    Outcome one;
    (void)fail_one({.function = "cudaPointerGetAttributes", .at_call = 2, .status = 701}, one);
    EXPECT_EQ(one.errors, 1u);
  }
  for (const std::string& function : functions) {
    (void)fail_one({.function = function, .at_call = 1, .status = 701}, outcome);
    EXPECT_GT(outcome.failed_calls[function], 0u) << function;
  }
  fail_spread({.status = 701}, 40, outcome);
  EXPECT_GT(3 * outcome.errors, outcome.cases);
}

// The GPU fails for good, as after a kernel's illegal access.
TEST_P(CudaFaults, AGpuThatFailsForGoodIsAnErrorWhereverItDoes) {
  for (const bool refuses_callbacks : {false, true}) {
    Outcome outcome;
    fail_spread({.status = 700, .is_lasting = true, .refuses_callbacks = refuses_callbacks}, 24,
                outcome);
    EXPECT_GE(2 * outcome.errors + 1, outcome.cases);
  }
}

// A question that fails tells nothing about the work: it is an error, and the work is waited for.
// The number of questions follows the time that a run takes; the first is there in every run.
TEST_P(CudaFaults, AQuestionAboutAnEventThatFailsIsAnError) {
  for (const bool is_lasting : {false, true}) {
    Outcome outcome;
    FakeCudaFault fault{
        .function = "cudaEventQuery", .at_call = 1, .status = 700, .is_lasting = is_lasting};
    (void)fail_one(fault, outcome);
    EXPECT_EQ(outcome.errors, 1u);
    fail_spread(fault, 8, outcome);
  }
}

INSTANTIATE_TEST_SUITE_P(Placements, CudaFaults, testing::ValuesIn(placements()),
                         [](const auto& tested) { return tested.param.name; });

// The text of an error is read from the GPU, which may fail just then.
TEST(CudaReadBack, ACallThatFailsIsAnErrorAndLeavesNoMemoryRegistered) {
  for (const char* const function :
       {"cudaHostRegister", "cudaStreamCreateWithPriority", "cudaEventCreateWithFlags",
        "cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize"}) {
    const auto device = make_cuda_device({.ordinal = 1, .memory_bytes = 1_MiB});
    const DeviceBuffer source(*device, 4_KiB, "a test");
    arm_fake_cuda_fault({.function = function, .at_call = 1, .status = 701});
    EXPECT_THROW((void)read_back(*device, source.data(), source.size_bytes()), Error) << function;
    EXPECT_EQ(disarm_fake_cuda_fault().failed_call, function);
    EXPECT_EQ(fake_cuda_registered_bytes(), 0u) << function;
  }
}

// The GPU fails on another thread meanwhile: what the stand-in refuses is not registered.
TEST(CudaRegistration, MemoryThatIsRefusedIsNotRegistered) {
  AlignedBuffer memory(4_KiB, "a test");
  const std::jthread failing([](const std::stop_token& end) {
    while (!end.stop_requested()) {
      fail_fake_cuda({.status = 700});
      fail_fake_cuda({.status = 0});
    }
  });
  for (unsigned round = 0; round < 400'000 && !testing::Test::HasFailure(); ++round) {
    const bool is_registered = cudaHostRegister(memory.data(), memory.size_bytes(),
                                                cudaHostRegisterPortable) == cudaSuccess;
    EXPECT_EQ(fake_cuda_registered_bytes(), is_registered ? memory.size_bytes() : 0);
    (void)cudaHostUnregister(memory.data());
  }
  (void)cudaGetLastError();
}

TEST(CudaGuard, AGuardOfLeasesIsRefused) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.memory.guard = GuardMode::kOn;
  const auto device = make_cuda_device({.ordinal = 1, .memory_bytes = 16_MiB});
  const std::string message =
      expect_error(ErrorCode::kConfig, [&] { const Engine engine(config, two_units(), *device); });
  EXPECT_NE(message.find("memory.guard"), std::string::npos) << message;
  EXPECT_NE(message.find("set it to \"auto\""), std::string::npos) << message;
  config.memory.guard = GuardMode::kAuto;
  const Engine engine(config, two_units(), *device);
}

}  // namespace
}  // namespace sluice::test
