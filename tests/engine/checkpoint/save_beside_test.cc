// Checkpoints that are written beside training: they hold the state of their step to the bit, the
// training goes on with the bits of one without them, and failures are reported once.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <tuple>

#include <sluice/checkpoint.h>
#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/checkpoint/checkpoint_source.h"
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "tests/engine/checkpoint/save_beside.h"
#include "tests/engine/exactness_cases.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/expect_error.h"
#include "tests/support/fault_queue.h"
#include "tests/support/slow_writes.h"

namespace sluice::test {
namespace {

namespace fs = std::filesystem;

class SaveBesideCase : public testing::TestWithParam<std::tuple<Case, PolicyCase>> {};

TEST_P(SaveBesideCase, HasTheStateOfItsStep) {
  const auto& [placement, policy] = GetParam();
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  placement.change(config);
  config.optimizer.overlap = policy.policy;
  config.optimizer.clip_norm = clip_norm_of(policy, 1);
  config.memory.save_buffers = 2;
  const ToyOptions options{
      .evaluate = true, .size = ToySize::kSmall, .has_own_memory = placement.is_gpu};
  (void)expect_exact(config, options, directory.file("checkpoints"));
}

INSTANTIATE_TEST_SUITE_P(, SaveBesideCase,
                         testing::Combine(testing::ValuesIn(kCases), testing::ValuesIn(kPolicies)),
                         [](const auto& value) {
                           return std::get<0>(value.param).name + "_" +
                                  std::get<1>(value.param).name;
                         });

TEST(SaveBeside, PrecisionsFrozenUnitsAndOneBuffer) {
  for (const DType type : {DType::kBf16, DType::kFp32, DType::kFp16}) {
    for (const std::vector<std::uint32_t>& frozen : {std::vector<std::uint32_t>{}, {1, 4}}) {
      SCOPED_TRACE(name_of(type));
      const TempDirectory directory;
      Config config = toy_config(directory.path());
      config.placement = {TierChoice::kNvme, TierChoice::kNvme};
      config.precision = {.parameters = type, .gradients = type};
      config.memory.save_buffers = 1;
      (void)expect_exact(config, {.frozen_units = frozen, .size = ToySize::kSmall},
                         directory.file("checkpoints"));
    }
  }
}

TEST(SaveBeside, SmallerMoments) {
  for (const OptimizerState moments : {OptimizerState::kBf16, OptimizerState::k8bit}) {
    const TempDirectory directory;
    Config config = toy_config(directory.path());
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config.optimizer.state = moments;
    config.memory.save_buffers = 2;
    (void)expect_exact(config, {.size = ToySize::kSmall}, directory.file("checkpoints"));
  }
}

// Commits and saves want the same blocks.
TEST(SaveBeside, ADurableStore) {
  for (const auto& [parameters, optimizer] : {std::pair(TierChoice::kNvme, TierChoice::kNvme),
                                              {TierChoice::kDevice, TierChoice::kHost},
                                              {TierChoice::kDevice, TierChoice::kDevice}}) {
    for (const OverlapPolicy policy : {OverlapPolicy::kDeferred, OverlapPolicy::kEager}) {
      const TempDirectory directory;
      Config config = toy_config(directory.path());
      config.placement = {parameters, optimizer};
      config.optimizer.overlap = policy;
      config.optimizer.clip_norm = 0;
      config.storage.state.name = "run";
      config.memory.save_buffers = 2;
      (void)expect_exact(config, {.size = ToySize::kSmall}, directory.file("checkpoints"));
    }
  }
}

// Every rank writes its own blocks, and rank 0 gives the checkpoint its name when all have.
TEST(SaveBeside, Ranks) {
  for (const std::uint32_t stage : {0u, 2u, 3u}) {
    SCOPED_TRACE(stage);
    const TempDirectory directory;
    const std::string root = directory.file("checkpoints");
    Config config = sharded_config(directory.path(), stage, true, DType::kBf16);
    config.memory.save_buffers = 1;
    ToyOptions options{.steps = 2, .rank_count = 3};
    const StateBytes then = toy_oracle(config, options).state;
    options.steps = 5;
    const StateBytes at_end = toy_oracle(config, options).state;
    const SlowWrites slow(kSlow);
    LocalWorld world(3, {.timeout_s = 60, .sum = sum_in_order});
    std::vector<std::string> paths(3);
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        const auto device = make_host_device({.memory_bytes = 64_MiB});
        const auto collectives = world.join(rank, *device);
        try {
          const ModelSpec model = toy_model();
          Engine engine(config, model, *device, collectives.get());
          ToyOptions own = options;
          own.rank = rank;
          own.after_step = [&](Engine& of, std::uint64_t step) {
            if (step == 2) of.begin_save(root, {.application = std::to_string(rank)});
            if (step == 5) paths[rank] = of.finish_save().value().path;
          };
          EXPECT_TRUE(run_toy(engine, model, *device, config, own).state == at_end);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
          collectives->abort(error.what());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(paths[2], root + "/step-000000002");
    EXPECT_TRUE(state_in(paths[0], toy_config(directory.path()), options) == then);
    EXPECT_EQ(CheckpointSource(paths[0]).manifest().application,
              (std::vector<std::string>{"0", "1", "2"}));
  }
}

class SaveBesideToy : public testing::Test {
 protected:
  SaveBesideToy() {
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config_.memory.save_buffers = 2;
    make();
  }
  void make(const QueueDecorator& decorate = {}) {
    engine_.reset();
    engine_.reset(new Engine(EngineOverQueue::make(config_, model_, *device_, decorate, nullptr)));
    engine_->initialize(toy_values());
    step();
  }
  void step() {
    const Stream stream(*device_, "compute");
    Step step = engine_->begin_step({.learning_rate = 1e-2});
    walk_step(step, model_, *engine_, *device_, stream, config_, 1);
    (void)step.finish();
  }
  std::set<std::string> entries() const {
    std::set<std::string> names;
    std::error_code missing;  // what a failed save has made goes again
    for (const fs::directory_entry& entry : fs::directory_iterator(root_, missing))
      names.insert(entry.path().filename().string());
    names.erase(".lock");
    return names;
  }
  // A save that `fails`: the next two calls of begin_step() go on, the second one with the failure.
  void expect_failure(ErrorCode code, const std::string& words) {
    while (engine_->save_progress()) step();
    const std::string message = expect_error(code, [&] { step(); });
    EXPECT_NE(message.find(words), std::string::npos) << message;
    EXPECT_EQ(entries(), std::set<std::string>());
    step();  // the failure is reported once, and the engine goes on
    const std::uint64_t now = engine_->position().step;
    engine_->begin_save(root_, {});
    EXPECT_EQ(engine_->finish_save().value().step, now);
  }

  TempDirectory directory_;
  std::string root_ = directory_.file("checkpoints");
  Config config_ = toy_config(directory_.path());
  ModelSpec model_ = toy_model();
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  std::unique_ptr<Engine> engine_;
};

TEST_F(SaveBesideToy, ItIsPolledOrWaitedFor) {
  EXPECT_FALSE(engine_->finish_save());
  EXPECT_FALSE(engine_->save_progress());
  {
    const SlowWrites slow(kSlow);
    engine_->begin_save(root_, {});
    const std::optional<SaveProgress> progress = engine_->save_progress();
    ASSERT_TRUE(progress);
    EXPECT_EQ(progress->step, 1u);
    EXPECT_EQ(progress->block_count, layout_of(*engine_).blocks().size());
    EXPECT_LT(progress->saved_blocks, progress->block_count);
    EXPECT_FALSE(engine_->poll_save());
  }
  std::optional<SavedCheckpoint> saved;
  while (!saved) {
    step();
    saved = engine_->poll_save();
  }
  EXPECT_EQ(saved->step, 1u);
  EXPECT_FALSE(engine_->poll_save());
  EXPECT_FALSE(engine_->finish_save());
}

TEST_F(SaveBesideToy, TheSameStepTwiceAndAnotherSaveWait) {
  const SlowWrites slow(kSlow);
  engine_->begin_save(root_, {});
  engine_->begin_save(root_, {.application = "second"});
  EXPECT_EQ(engine_->save(root_, {.application = "third"}).path, root_ + "/step-000000001.2");
  EXPECT_EQ(entries(), (std::set<std::string>{"step-000000001.2", "latest"}));
}

TEST_F(SaveBesideToy, CloseWaitsForIt) {
  const SlowWrites slow(kSlow);
  engine_->begin_save(root_, {});
  engine_->close();
  CheckpointSource(root_ + "/latest").verify();
}

TEST_F(SaveBesideToy, ReplacedValuesWaitForIt) {
  const StateBytes before = read_state(*engine_);
  {
    const SlowWrites slow(kSlow);
    engine_->begin_save(root_, {});
    std::vector<TensorId> all;
    for (const TensorPlace& tensor : engine_->tensors()) all.push_back(tensor.id);
    engine_->replace_values(all, [](const TensorPlace&, std::uint64_t, std::span<float> values) {
      std::ranges::fill(values, 0.5f);
    });
  }
  EXPECT_TRUE(engine_->finish_save());
  EXPECT_FALSE(read_state(*engine_) == before);
  EXPECT_TRUE(state_in(root_ + "/latest", config_, {}) == before);
}

TEST_F(SaveBesideToy, AnEngineThatGoesLeavesNothingHalfWritten) {
  const SlowWrites slow(kSlow);
  engine_->begin_save(root_, {});
  step();
  engine_.reset();
  EXPECT_EQ(entries(), std::set<std::string>());
}

TEST_F(SaveBesideToy, WithoutBuffersItIsRefused) {
  config_.memory.save_buffers = 0;
  make();
  const std::string message =
      expect_error(ErrorCode::kInvalidArgument, [&] { engine_->begin_save(root_, {}); });
  EXPECT_NE(message.find("memory.save_buffers"), std::string::npos) << message;
  EXPECT_FALSE(fs::exists(root_));
}

TEST_F(SaveBesideToy, AFolderThatCannotBe) {
  std::ofstream(directory_.file("plain")) << "a file";
  EXPECT_NE(
      expect_error(ErrorCode::kInput, [&] { engine_->begin_save(directory_.file("plain"), {}); })
          .find("plain"),
      std::string::npos);
  step();
  EXPECT_FALSE(engine_->finish_save());
}

// The files are made in full before the first block, so a full disk stops the save at once.
TEST_F(SaveBesideToy, NoRoom) {
  engine_->drain();
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit{.rlim_cur = 64_KiB, .rlim_max = old_limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string message =
      expect_error(ErrorCode::kNoSpace, [&] { engine_->begin_save(root_, {}); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_NE(message.find(".safetensors"), std::string::npos) << message;
  EXPECT_EQ(entries(), std::set<std::string>());
  step();
}

// A writer's thread fails in the middle of the state: file systems without reserved room do that.
TEST_F(SaveBesideToy, AWriteThatFails) {
  fail_write(40, ENOSPC);
  engine_->begin_save(root_, {});
  expect_failure(ErrorCode::kNoSpace, "No space left on device");
}

// The disk is full when nine tenths are written: the checkpoint before stays, whole and the latest.
TEST_F(SaveBesideToy, ADiskThatIsFullAtNinetyPercent) {
  const int before = count_writes();
  engine_->begin_save(root_, {.keep = 1});
  (void)engine_->finish_save();
  const int writes = count_writes() - before;
  ASSERT_GE(writes, 20);
  const std::set<std::string> kept = entries();
  const StateBytes saved = state_in(root_ + "/latest", config_, {});
  const auto expect_kept = [&](const std::string& message) {
    EXPECT_NE(message.find("No space left on device; remove old checkpoints"), std::string::npos)
        << message;
    EXPECT_NE(message.find(".safetensors"), std::string::npos) << message;
    EXPECT_EQ(entries(), kept);
    EXPECT_TRUE(state_in(root_ + "/latest", config_, {}) == saved);
  };
  step();
  fail_write(9 * writes / 10, ENOSPC);
  engine_->begin_save(root_, {.keep = 1});
  while (engine_->save_progress()) step();
  expect_kept(expect_error(ErrorCode::kNoSpace, [&] { step(); }));
  fail_write(9 * writes / 10, ENOSPC);
  expect_kept(expect_error(ErrorCode::kNoSpace, [&] { (void)engine_->save(root_, {.keep = 1}); }));
  const SavedCheckpoint next = engine_->save(root_, {.keep = 1});
  EXPECT_EQ(entries(), (std::set<std::string>{fs::path(next.path).filename(), "latest"}));
  EXPECT_TRUE(state_in(next.path, config_, {}) == read_state(*engine_));
}

TEST_F(SaveBesideToy, AFlushThatFails) {
  fail_sync(0, EIO);
  engine_->begin_save(root_, {});
  expect_failure(ErrorCode::kIo, "Input/output error");
}

TEST_F(SaveBesideToy, AFailureThatIsPolledForIsNotThrownAgain) {
  fail_write(40, EIO);
  engine_->begin_save(root_, {});
  while (engine_->save_progress()) step();
  EXPECT_NE(expect_error(ErrorCode::kIo, [&] { (void)engine_->poll_save(); }).find(".safetensors"),
            std::string::npos);
  step();
  engine_->close();
}

TEST_F(SaveBesideToy, ALaterSaveThrowsAFailureThatNoCallHasThrown) {
  const std::function<void()> calls[] = {[&] { engine_->begin_save(root_, {}); },
                                         [&] { (void)engine_->save(root_, {}); },
                                         [&] { (void)engine_->finish_save(); }};
  for (const std::function<void()>& call : calls) {
    fail_write(40, EIO);
    engine_->begin_save(root_, {});
    EXPECT_NE(expect_error(ErrorCode::kIo, call).find(".safetensors"), std::string::npos);
    EXPECT_FALSE(engine_->save_progress());
    EXPECT_EQ(entries(), std::set<std::string>());
  }
}

TEST_F(SaveBesideToy, CallsDuringAStepAreRefused) {
  const Step step = engine_->begin_step({.learning_rate = 1e-2});
  expect_error(ErrorCode::kInvalidArgument, [&] { engine_->begin_save(root_, {}); });
  expect_error(ErrorCode::kInvalidArgument, [&] { (void)engine_->finish_save(); });
  EXPECT_FALSE(engine_->poll_save());
}

TEST_F(SaveBesideToy, CloseThrowsAFailureThatNoCallHasThrown) {
  fail_write(40, EIO);
  engine_->begin_save(root_, {});
  EXPECT_NE(expect_error(ErrorCode::kIo, [&] { engine_->close(); }).find(".safetensors"),
            std::string::npos);
}

// A drive of the state fails, which stops the engine: the save ends, and leaves nothing.
TEST_F(SaveBesideToy, AReadThatFails) {
  make([](std::unique_ptr<IoQueue> inner) {
    return make_fault_queue(std::move(inner), {.at = 400, .error = EIO, .sticky = true});
  });
  const std::string message = expect_error(ErrorCode::kIo, [&] {
    for (int i = 0; i < 1000; ++i) {
      engine_->begin_save(root_, {});
      (void)engine_->finish_save();
    }
  });
  EXPECT_NE(message.find("unit \""), std::string::npos) << message;
  engine_.reset();
  EXPECT_EQ(entries().size(), 2u);
}

}  // namespace
}  // namespace sluice::test
