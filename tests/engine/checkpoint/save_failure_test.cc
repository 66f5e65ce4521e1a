// A checkpoint that cannot be saved: the error names the file, on every rank; the engine goes on,
// and what was there before is as it was.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>

#include <sluice/checkpoint.h>
#include <sluice/error.h>
#include <sluice/units.h>
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/expect_error.h"
#include "tests/support/refused_syscall.h"

namespace sluice::test {
namespace {

namespace fs = std::filesystem;

class SaveFailure : public testing::Test {
 protected:
  SaveFailure() { (void)run_toy(engine_, model_, *device_, config_, {.steps = 1}); }

  std::set<std::string> entries() const {
    std::set<std::string> names;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root_))
      if (entry.path().filename() != ".lock")
        names.insert(entry.path().string() + " " +
                     (entry.is_regular_file() ? std::to_string(entry.file_size()) : "-"));
    return names;
  }

  // A first checkpoint, then a step, then one that `fails`, then one that does not.
  template <typename Fails>
  void expect_to_go_on(const Fails& fails) {
    (void)engine_.save(root_, {});
    const Stream stream(*device_, "compute");
    Step step = engine_.begin_step({.learning_rate = 1e-2});
    walk_step(step, model_, engine_, *device_, stream, config_, 1);
    (void)step.finish();
    const StateBytes state = read_state(engine_);
    const std::set<std::string> before = entries();
    fails();
    EXPECT_EQ(entries(), before);
    EXPECT_TRUE(read_state(engine_) == state);
    EXPECT_EQ(engine_.save(root_, {}).step, 2u);
    EXPECT_GT(entries().size(), before.size());
  }

  TempDirectory directory_;
  std::string root_ = directory_.file("checkpoints");
  Config config_ = toy_config(directory_.path());
  ModelSpec model_ = toy_model();
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  Engine engine_{config_, model_, *device_};
};

TEST_F(SaveFailure, AFolderThatCannotBe) {
  expect_to_go_on([&] {
    std::ofstream(directory_.file("plain")) << "a file";
    for (const std::string& root : {directory_.file("plain"), directory_.file("plain") + "/below"})
      EXPECT_NE(expect_error(ErrorCode::kInput, [&] { (void)engine_.save(root, {}); }).find(root),
                std::string::npos);
  });
}

TEST_F(SaveFailure, OptionsThatCannotBe) {
  expect_to_go_on([&] {
    for (const std::string name :
         {"", ".", "..", ".hidden", "a/b", "../evil", "sluice_state.json",
          "model.safetensors.index.json", "model-00001-of-00001.safetensors"}) {
      const auto words = expect_error(ErrorCode::kInvalidArgument, [&] {
        (void)engine_.save(root_, {.files = {{name, "text"}}});
      });
      EXPECT_NE(words.find("SaveOptions::files has the name \"" + name + "\""), std::string::npos)
          << words;
    }
    expect_error(ErrorCode::kInvalidArgument,
                 [&] { (void)engine_.save(root_, {.application = "\xff"}); });
    const auto words = expect_error(ErrorCode::kInvalidArgument, [&] {
      (void)engine_.save(root_, {.hyperparameters = {{"r\xff", 1}}});
    });
    EXPECT_NE(words.find("SaveOptions::hyperparameters is not UTF-8"), std::string::npos) << words;
  });
  EXPECT_EQ(std::filesystem::exists(directory_.file("evil")), false);
}

TEST_F(SaveFailure, NoRoom) {
  expect_to_go_on([&] {
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
    rlimit old_limit{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
    const rlimit limit{.rlim_cur = 64_KiB, .rlim_max = old_limit.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    const std::string message =
        expect_error(ErrorCode::kNoSpace, [&] { (void)engine_.save(root_, {}); });
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
    std::signal(SIGXFSZ, old_handler);
    EXPECT_NE(message.find(".safetensors"), std::string::npos) << message;
  });
}

TEST_F(SaveFailure, ADriveThatDoesNotSync) {
  bool filtered = true;
  expect_to_go_on([&] {
    filtered = run_with_refused({.number = SYS_fsync, .error = EIO}, [&] {
      const std::string message =
          expect_error(ErrorCode::kIo, [&] { (void)engine_.save(root_, {}); });
      EXPECT_NE(message.find(root_), std::string::npos) << message;
      EXPECT_NE(message.find(".safetensors"), std::string::npos) << message;
      EXPECT_NE(message.find("Input/output error"), std::string::npos) << message;
      EXPECT_NE(message.find("check the drive"), std::string::npos) << message;
    });
  });
  if (!filtered) GTEST_SKIP() << "seccomp filters are not allowed here";
}

// A network file system says at the close what it could not store.
TEST_F(SaveFailure, AServerWithoutRoom) {
  bool filtered = true;
  expect_to_go_on([&] {
    filtered = run_with_refused({.number = SYS_close, .error = EDQUOT}, [&] {
      const std::string message =
          expect_error(ErrorCode::kNoSpace, [&] { (void)engine_.save(root_, {}); });
      EXPECT_NE(message.find(".safetensors"), std::string::npos) << message;
      EXPECT_NE(message.find("raise the quota"), std::string::npos) << message;
    });
  });
  if (!filtered) GTEST_SKIP() << "seccomp filters are not allowed here";
}

// One rank's drive fails, and all of them hear of it.
TEST(SaveFailureOfRanks, IsEveryRanks) {
  constexpr RefusedSyscall kNoWrite{.number = SYS_pwrite64, .error = EIO};
  if (!run_with_refused(kNoWrite, [] {})) GTEST_SKIP() << "seccomp filters are not allowed here";
  const TempDirectory directory;
  const std::string root = directory.file("checkpoints");
  const Config config = sharded_config(directory.path(), 3, false, DType::kBf16);
  LocalWorld world(3, {.timeout_s = 60, .sum = sum_in_order});
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      const auto collectives = world.join(rank, *device);
      Engine engine(config, toy_model(), *device, collectives.get());
      engine.initialize(toy_values());
      EXPECT_TRUE(rank != 2 || refuse_for_this_thread(kNoWrite));
      try {
        (void)engine.save(root, {});
        ADD_FAILURE() << "rank " << rank << " has heard nothing";
      } catch (const Error& error) {
        EXPECT_TRUE(error.code() == ErrorCode::kIo) << error.what();
        const bool names_root = std::string(error.what()).find(root) != std::string::npos;
        EXPECT_TRUE(names_root || rank != 2) << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(fs::exists(root)) << "what a failed save has made goes again";
}

}  // namespace
}  // namespace sluice::test
