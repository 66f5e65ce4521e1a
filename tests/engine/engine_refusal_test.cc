// Refusals and failures of an engine in places where no other test looks: in its constructor, while
// something is active, and around its durable store. Nothing is left behind or changed by it.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>

#include <sluice/checkpoint.h>
#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/engine_over_queue.h"
#include "tests/support/expect_error.h"
#include "tests/support/fault_queue.h"
#include "tests/support/flush_fault.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

class EngineRefusal : public testing::Test {
 protected:
  EngineRefusal() { config_.placement = {TierChoice::kNvme, TierChoice::kNvme}; }

  // Every one of `words` is in the message of the error that `call` throws.
  template <typename Call>
  static void expect_refused(ErrorCode code, std::initializer_list<std::string_view> words,
                             const Call& call) {
    const std::string message = expect_error(code, call);
    for (const std::string_view word : words)
      EXPECT_NE(message.find(word), std::string::npos)
          << '"' << word << "\" is not in: " << message;
  }

  std::ptrdiff_t files() const {
    return std::distance(std::filesystem::directory_iterator(directory_.path()), {});
  }

  void train_a_step(Engine& engine) {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    walk_step(step, model_, engine, *device_, stream_, config_, 1);
    (void)step.finish();
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ModelSpec model_ = toy_model();
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  Stream stream_{*device_, "compute"};
};

TEST_F(EngineRefusal, AModelThatCannotBe) {
  model_.units.clear();
  expect_refused(ErrorCode::kInvalidArgument, {"no units"},
                 [&] { const Engine engine(config_, model_, *device_); });
  EXPECT_EQ(device_->allocated_bytes(), 0u);
  EXPECT_EQ(files(), 0);
}

TEST_F(EngineRefusal, AStorageWithoutRoom) {
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit{.rlim_cur = 64_KiB, .rlim_max = old_limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  expect_refused(ErrorCode::kNoSpace, {directory_.path()},
                 [&] { const Engine engine(config_, model_, *device_); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(device_->allocated_bytes(), 0u);
  EXPECT_EQ(files(), 0);
}

TEST_F(EngineRefusal, CallsWhileSomethingIsActive) {
  config_.storage.state = {.name = "run", .commit_every = 100};
  Engine engine(config_, model_, *device_);
  engine.initialize(toy_values());
  const StateBytes before = read_state(engine);
  const std::string root = directory_.file("saved");
  const auto refuse_all = [&] {
    const auto refuse = [&](std::string_view call, const auto& body) {
      expect_refused(ErrorCode::kInvalidArgument, {call, "active"}, body);
    };
    refuse("save", [&] { (void)engine.save(root, {}); });
    refuse("position", [&] { (void)engine.position(); });
    refuse("commit_now", [&] { engine.commit_now(); });
    refuse("read_state", [&] { (void)read_state(engine); });
    refuse("begin_inference", [&] { (void)engine.begin_inference(); });
    refuse("begin_step", [&] { (void)engine.begin_step({.learning_rate = 1}); });
    refuse("close", [&] { engine.close(); });
  };
  {
    const Step step = engine.begin_step({.learning_rate = 1});
    refuse_all();
  }
  {
    const Inference inference = engine.begin_inference();
    refuse_all();
  }
  EXPECT_FALSE(std::filesystem::exists(root));
  EXPECT_TRUE(read_state(engine) == before);
  train_a_step(engine);
  engine.commit_now();
  EXPECT_EQ(engine.committed_step(), 1u);
}

// Such an update would leave infinities in every weight.
TEST_F(EngineRefusal, RatesBeyondFp32) {
  config_.optimizer.groups = {{.tensors = {"wte"}, .learning_rate_factor = 100}};
  Engine engine(config_, model_, *device_);
  engine.initialize(toy_values());
  const auto refuse = [&](const StepOptions& options, std::string_view words) {
    expect_refused(ErrorCode::kInvalidArgument, {words}, [&] { (void)engine.begin_step(options); });
  };
  refuse({.learning_rate = 1e39}, "begin_step: learning_rate is 1e+39");
  refuse({.learning_rate = 1e37}, "learning_rate_factor of optimizer.groups[0] is 1e+39");
  refuse({.learning_rate = 1, .group_learning_rates = {1e39}}, "rates[0] is 1e+39");
  (void)engine.begin_step({.learning_rate = 1e37, .group_learning_rates = {1}});
}

// The ways beside initialize() refuse the same values.
TEST_F(EngineRefusal, ValuesOfAStoreThatAreNotFinite) {
  config_.storage.state = {.name = "run", .commit_every = 1};
  const InitialValues infinite = [](const TensorPlace& tensor, std::uint64_t first,
                                    std::span<float> values) {
    toy_values()(tensor, first, values);
    if (tensor.name == "h.1.fc" && first <= 9 && 9 < first + values.size())
      values[9 - first] = INFINITY;
  };
  Engine engine(config_, model_, *device_);
  expect_refused(ErrorCode::kNonFinite, {"\"h.1.fc\"", "element 9"},
                 [&] { (void)engine.open_or_create(infinite); });
  expect_refused(ErrorCode::kInvalidArgument, {"open_or_create", "function"},
                 [&] { (void)engine.open_or_create({}); });
  EXPECT_TRUE(engine.open_or_create(toy_values()).is_new);
}

class StoreInMemory : public EngineRefusal {
 protected:
  // A store of step 1, all of which is at home in host memory, and so read when it is opened.
  StoreInMemory() {
    config_.placement = {TierChoice::kHost, TierChoice::kHost};
    config_.storage.state = {.name = "run", .commit_every = 1};
    Engine engine(config_, model_, *device_);
    engine.initialize(toy_values());
    train_a_step(engine);
    engine.close();
  }
};

TEST_F(StoreInMemory, ThatTheDriveDoesNotGive) {
  Engine engine =
      EngineOverQueue::make(config_, model_, *device_, [](std::unique_ptr<IoQueue> queue) {
        return make_fault_queue(std::move(queue), {.at = 3, .error = EIO, .sticky = true});
      });
  expect_refused(ErrorCode::kIo, {"read", "of unit \"", directory_.path()},
                 [&] { (void)engine.open_or_create(toy_values()); });
}

TEST_F(StoreInMemory, ThatHasBeenDamaged) {
  for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) {
    if (entry.path().string().find(".data") == std::string::npos) continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    for (std::uint64_t at = 17; at < entry.file_size(); at += 4096) {
      file.seekg(static_cast<std::streamoff>(at));
      const auto byte = static_cast<char>(file.get() ^ 4);
      file.seekp(static_cast<std::streamoff>(at));
      file.put(byte);
    }
  }
  Engine engine(config_, model_, *device_);
  expect_refused(ErrorCode::kDamaged, {"checksum", "of unit \"", directory_.path()},
                 [&] { (void)engine.open_or_create(toy_values()); });
}

TEST_F(EngineRefusal, ACommitThatTheDriveDoesNotTake) {
  config_.storage.state = {.name = "run", .commit_every = 100};
  // Behind the commit of step 0: of the data file, and of each twin of the record.
  Engine engine =
      EngineOverQueue::make(config_, model_, *device_, [](std::unique_ptr<IoQueue> queue) {
        return std::make_unique<FlushFault>(std::move(queue), EIO, 3);
      });
  engine.initialize(toy_values());
  train_a_step(engine);
  engine.drain();
  EXPECT_EQ(engine.committed_step(), 0u);
  expect_refused(ErrorCode::kIo, {"flush of " + directory_.path(), "for the commit of step 1"},
                 [&] { engine.commit_now(); });
  EXPECT_EQ(engine.committed_step(), 0u);
}

}  // namespace
}  // namespace sluice::test
