// Engines whose pools are more than there is: in a control group with a limit, and on a device with
// memory of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include <fmt/ranges.h>

#include <sluice/detached_optimizer.h>
#include <sluice/engine.h>
#include <sluice/error.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/local_collectives.h"
#include "tests/support/expect_error.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/memory_group.h"
#include "tests/support/temp_directory.h"

namespace sluice {
namespace {

using test::expect_error;
using test::MemoryGroup;

constexpr std::uint64_t kLimitBytes = 256_MiB;

// `units` of 8 MiB of fp32 parameters and 16 MiB of moments.
ModelSpec model_of(std::uint32_t units) {
  ModelSpec model;
  for (std::uint32_t unit = 0; unit < units; ++unit) {
    const std::string name = fmt::format("h.{}", unit);
    model.units.push_back({.name = name, .tensors = {{.name = name + ".w", .shape = {2 << 20}}}});
  }
  return model;
}

Config config_of(RoomCheck check) {
  Config config;
  config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config.placement = {.parameters = TierChoice::kHost, .optimizer = TierChoice::kHost};
  config.memory = {.device_bytes = 64_MiB, .host_bytes = 4_GiB, .check = check};
  config.threads = 1;
  return config;
}

std::string made(const Config& config, const ModelSpec& model, Device& device,
                 Collectives* ranks = nullptr) {
  try {
    const Engine engine(config, model, device, ranks);
    return fmt::format("made\n{}", fmt::join(engine.notes(), "\n"));
  } catch (const Error& error) {
    return fmt::format("{}\n{}", static_cast<int>(error.code()), error.what());
  }
}

std::string made(const Config& config, const ModelSpec& model) {
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  return made(config, model, *device);
}

std::string made_detached(const Config& config) {
  try {
    DetachedOptimizer optimizer(
        config, {{.name = "w", .element_count = 48 << 20, .parameter = DType::kFp32}});
    return fmt::format("made\n{}", fmt::join(optimizer.take_notes(), "\n"));
  } catch (const Error& error) {
    return fmt::format("{}\n{}", static_cast<int>(error.code()), error.what());
  }
}

class MemoryCheckInGroup : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "a sanitizer's shadow memory counts as the process's";
#endif
    if (!group_.exists()) GTEST_SKIP() << "no control group with a limit can be made here";
  }
  void expect_refusal(const std::string& said) {
    EXPECT_TRUE(said.starts_with(fmt::format("{}\n", static_cast<int>(ErrorCode::kOutOfMemory))))
        << said;
    for (const char* const part :
         {"of the host's memory", "the cgroup's limit of 256 MiB leaves", "host pools",
          "what this process has already", "lower memory.host", "memory.check"})
      EXPECT_NE(said.find(part), std::string::npos) << part << " in " << said;
  }

  MemoryGroup group_{kLimitBytes};
};

// 14 units: 336 MiB of parameters and moments, of which nothing is touched before initialize().
TEST_F(MemoryCheckInGroup, AnEngineBeyondTheLimitIsRefused) {
  expect_refusal(group_.run([] { return made(config_of(RoomCheck::kError), model_of(14)); }));
}

TEST_F(MemoryCheckInGroup, AnEngineBelowTheLimitIsMadeWithoutAWord) {
  EXPECT_EQ(group_.run([] { return made(config_of(RoomCheck::kError), model_of(4)); }), "made\n");
}

// Two ranks of 96 MiB and more each, where one has room: each is told, whatever the other has by
// then.
TEST_F(MemoryCheckInGroup, RanksShareTheLimit) {
  const auto make_ranks = [&](std::uint32_t units) {
    return group_.run([&] {
      std::array<std::string, 2> said;
      LocalWorld world(2, {.timeout_s = 60, .sum = sum_in_order});
      std::vector<std::thread> threads;
      for (std::uint32_t rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&, rank] {
          const auto device = make_host_device({.memory_bytes = 64_MiB});
          const auto collectives = world.join(rank, *device);
          Config config = config_of(RoomCheck::kError);
          config.sharding.stage = 0;
          config.placement.parameters = TierChoice::kDevice;
          said[rank] = made(config, model_of(units), *device, collectives.get());
        });
      }
      for (std::thread& thread : threads) thread.join();
      return fmt::format("{}", fmt::join(said, "\n"));
    });
  };
  EXPECT_EQ(make_ranks(1), "made\n\nmade\n");
  const std::string said = make_ranks(4);
  EXPECT_NE(said.find("leaves for each of the 2 ranks here"), std::string::npos) << said;
  EXPECT_EQ(said.find("made"), std::string::npos) << said;
}

// Told to go on, it does: the kernel has the last word, unless there is swap.
TEST_F(MemoryCheckInGroup, GoesOnWhereItIsTold) {
  const auto made_by_force = [](const std::string& said) {
    return said.starts_with("made\n") || said.starts_with(fmt::format("status {}", SIGKILL));
  };
  for (const RoomCheck check : {RoomCheck::kWarn, RoomCheck::kOff}) {
    const std::string engine = group_.run([&] { return made(config_of(check), model_of(14)); });
    EXPECT_TRUE(made_by_force(engine)) << engine;
    const std::string detached = group_.run([&] { return made_detached(config_of(check)); });
    EXPECT_TRUE(made_by_force(detached)) << detached;
  }
}

// A budget that the config leaves out is what the group leaves, less what the program has already;
// the rest goes to storage.
TEST_F(MemoryCheckInGroup, ABudgetThatIsAutoFits) {
  const test::TempDirectory directory;
  for (const std::uint64_t taken_bytes : {1_MiB, 130_MiB}) {
    EXPECT_EQ(group_.run([&] {
      const std::vector<char> taken(taken_bytes, 'x');
      Config config = config_of(RoomCheck::kError);
      config.placement = {};
      config.memory = {.device_bytes = 40_MiB};
      config.storage.paths = {directory.path()};
      return made(config, model_of(14));
    }),
              "made\n")
        << taken_bytes;
  }
}

TEST_F(MemoryCheckInGroup, ADetachedOptimizerToo) {
  expect_refusal(group_.run([] { return made_detached(config_of(RoomCheck::kError)); }));
}

// A device that stands for a GPU, most of whose memory is gone.
TEST(MemoryCheckOnDevice, PoolsBeyondWhatIsFreeAreRefusedByName) {
  const auto device = make_host_device({.memory_bytes = 40_MiB, .has_own_memory = true});
  Config config = config_of(RoomCheck::kError);
  config.memory.device_bytes = 100_MiB;
  config.placement.parameters = TierChoice::kDevice;
  const auto make = [&] { const Engine engine(config, model_of(6), *device); };
  const std::string message = expect_error(ErrorCode::kOutOfMemory, make);
  for (const char* const part :
       {"the run needs ", "of host, which has 40.0 MiB free", "lower memory.device to \"40960KiB\"",
        "resident parameters", "memory.check"})
    EXPECT_NE(message.find(part), std::string::npos) << part << " in " << message;
  // Told to go on, it fails where the memory is asked for.
  config.memory.check = RoomCheck::kOff;
  EXPECT_EQ(expect_error(ErrorCode::kOutOfMemory, make).find("memory.check"), std::string::npos);
}

// Less is free than there is, as where other processes use the GPU.
class PoorDevice final : public test::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  std::uint64_t free_bytes() const override { return 40_MiB; }
};

TEST(MemoryCheckOnDevice, WarnsOrSaysNothingWhereItIsTold) {
  PoorDevice device(make_host_device({.memory_bytes = 200_MiB, .has_own_memory = true}));
  Config config = config_of(RoomCheck::kError);
  config.memory.device_bytes = 100_MiB;
  config.placement.parameters = TierChoice::kDevice;
  (void)expect_error(ErrorCode::kOutOfMemory, [&] { Engine(config, model_of(6), device); });
  const auto has_note = [&] {
    const Engine engine(config, model_of(6), device);
    return std::ranges::any_of(engine.notes(), [](const std::string& note) {
      return note.find("which has 40.0 MiB free") != std::string::npos;
    });
  };
  config.memory.check = RoomCheck::kWarn;
  EXPECT_TRUE(has_note());
  config.memory.check = RoomCheck::kOff;
  EXPECT_FALSE(has_note());
}

// The size that the refusal names works.
TEST(MemoryCheckOnDevice, WhatIsFreeIsEnough) {
  const auto device = make_host_device({.memory_bytes = 40_MiB, .has_own_memory = true});
  Config config = config_of(RoomCheck::kError);
  config.memory.device_bytes = 40_MiB;
  config.placement.parameters = TierChoice::kAuto;
  EXPECT_NO_THROW(Engine(config, model_of(6), *device));
}

}  // namespace
}  // namespace sluice
