// Blocks over several storage paths: the shares that were asked for, where weights come from, and
// that no bit depends on them.
#include "engine/plan/striping.h"
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"

#include <sys/stat.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/topology.h"
#include "io/direct_file.h"
#include "io/io_queue.h"
#include "tests/support/expect_error.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

class Striped : public testing::Test {
 protected:
  // Everything on storage, over folders of their own, one for each weight.
  Config config_for(const std::vector<double>& weights) {
    Config config = toy_config("");
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config.memory.host_bytes = 1_MiB;
    config.storage.paths.clear();
    for (std::size_t i = 0; i < weights.size(); ++i) {
      config.storage.paths.push_back(directory_.file("drive" + std::to_string(i)));
      std::filesystem::create_directory(config.storage.paths.back());
    }
    config.storage.weights = weights;
    return config;
  }

  std::string write_calibration(const std::string& text) {
    const std::string path = directory_.file("io.json");
    std::ofstream(path) << text;
    return path;
  }

  Striping striping_of(const Config& config) {
    const ModelSpec model = validated(toy_model());
    layout_.emplace(model, state_format(config), config.storage.block_elements);
    placement_ = plan_placement(*layout_, model, config.placement,
                                {.device_bytes = 64_MiB, .host_bytes = *config.memory.host_bytes});
    return plan_striping(*layout_, placement_, storage_weights(config.storage));
  }

  std::uint64_t bytes_of(const BlockPlace& block) const {
    const std::uint32_t i = index_of(block.id);
    return placement_.storage_copies *
           ((placement_.parameter_tier[i] == Tier::kNvme ? layout_->parameter_slot_bytes(block.id)
                                                         : 0) +
            (placement_.record_tier[i] == Tier::kNvme ? layout_->record_slot_bytes(block.id) : 0));
  }

  TempDirectory directory_;
  std::optional<Layout> layout_;
  Placement placement_;
};

// Counted from the blocks, after each of them: never further from the share than a block.
TEST_F(Striped, EveryRunOfBlocksIsSpreadInProportion) {
  for (const std::vector<double>& weights :
       {std::vector<double>{1}, {1, 1}, {3, 1}, {1, 3}, {5.5, 0.25, 2}, {1e-3, 1e-3, 1e-3, 1e-3}}) {
    for (const TierChoice choice : {TierChoice::kNvme, TierChoice::kAuto}) {  // all; a part of it
      SCOPED_TRACE(testing::PrintToString(weights));
      Config config = config_for(weights);
      config.placement = {choice, choice};
      const Striping striping = striping_of(config);
      const double weight_sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      std::vector<std::uint64_t> counted(weights.size(), 0);
      std::uint64_t sum = 0;
      std::uint64_t largest = 0;
      for (const BlockPlace& block : layout_->blocks()) {
        const std::uint64_t bytes = bytes_of(block);
        counted.at(striping.drive[index_of(block.id)]) += bytes;
        sum += bytes;
        largest = std::max(largest, bytes);
        for (std::size_t drive = 0; drive < weights.size(); ++drive) {
          const double share = static_cast<double>(sum) * weights[drive] / weight_sum;
          ASSERT_LE(std::abs(static_cast<double>(counted[drive]) - share),
                    static_cast<double>(largest))
              << "drive " << drive << " after block " << index_of(block.id);
        }
      }
      EXPECT_EQ(counted, striping.drive_bytes);
      EXPECT_EQ(sum, placement_.nvme_bytes());
      EXPECT_GT(sum, 10 * largest);
    }
  }
}

TEST_F(Striped, BlocksOfTheHeavierDriveDoNotComeInARow) {
  const Striping striping = striping_of(config_for({3, 1}));
  std::uint32_t in_a_row = 0;
  for (const BlockPlace& block : layout_->blocks()) {
    in_a_row = striping.drive[index_of(block.id)] == 0 ? in_a_row + 1 : 0;
    EXPECT_LE(in_a_row, 6u);
  }
}

// Passes everything on and counts bytes by file.
class Counting final : public IoQueue {
 public:
  Counting(std::unique_ptr<IoQueue> inner, std::map<std::uint32_t, std::uint64_t>& bytes,
           std::set<std::pair<std::uint32_t, ino_t>>& files)
      : inner_(std::move(inner)), bytes_(bytes), files_(files) {}
  void submit(std::span<IoRequest* const> requests) override {
    for (const IoRequest* request : requests) {
      struct stat status {};
      ASSERT_EQ(::fstat(request->descriptor, &status), 0);
      const std::scoped_lock lock(mutex_);
      bytes_[request->drive] += request->length_bytes;
      files_.insert({request->drive, status.st_ino});
    }
    inner_->submit(requests);
  }
  void wait_idle() override { inner_->wait_idle(); }
  IoCounters counters() const override { return inner_->counters(); }
  std::string_view name() const override { return inner_->name(); }

 private:
  std::unique_ptr<IoQueue> inner_;
  std::map<std::uint32_t, std::uint64_t>& bytes_;
  std::set<std::pair<std::uint32_t, ino_t>>& files_;
  std::mutex mutex_;
};

TEST_F(Striped, BitsDoNotDependOnPathsAndWeightsAndEachDriveMovesItsShare) {
  const ToyOptions options{.steps = 2, .micro_batches = 2};
  for (const std::vector<double>& weights :
       {std::vector<double>{7}, {1, 4}, {0.5, 2, 1.25}, {1, 1e-9}}) {
    for (const IoBackend backend : {IoBackend::kAuto, IoBackend::kThreads, IoBackend::kSync}) {
      SCOPED_TRACE(testing::PrintToString(weights));
      Config config = config_for(weights);
      config.storage.backend = backend;
      std::map<std::uint32_t, std::uint64_t> bytes;
      std::set<std::pair<std::uint32_t, ino_t>> files;
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      const ModelSpec model = toy_model();
      Engine engine =
          EngineOverQueue::make(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
            return std::make_unique<Counting>(std::move(queue), bytes, files);
          });
      EXPECT_TRUE(same_training(run_toy(engine, model, *device, config, options),
                                toy_oracle(config, options)));
      ASSERT_EQ(storage_files_of(engine).size(), weights.size());
      const double weight_sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      std::uint64_t sum = 0;
      for (const auto& [drive, moved] : bytes) sum += moved;
      EXPECT_EQ(files.size(), bytes.size());  // one file a drive
      for (std::size_t drive = 0; drive < weights.size(); ++drive) {
        // The share over a few hundred transfers of each block, to within a block's part of the
        // whole.
        const double share = weights[drive] / weight_sum;
        EXPECT_NEAR(static_cast<double>(bytes[static_cast<std::uint32_t>(drive)]) /
                        static_cast<double>(sum),
                    share, 0.05);
      }
    }
  }
}

TEST_F(Striped, WeightsComeFromTheCalibrationByFolder) {
  Config config = config_for({1, 1, 1});
  config.storage.weights.clear();
  EXPECT_EQ(storage_weights(config.storage), (std::vector<double>{1, 1, 1}));
  const std::string drive = std::filesystem::canonical(directory_.path()).string() + "/drive";
  config.storage.calibration = write_calibration(
      R"({"format": "sluice-io-calibration-1", "drives": [)"
      R"({"path": ")" +
      drive +
      R"(2", "mixed": 2e9, "read": 9e9},)"
      R"({"path": "/elsewhere", "mixed": 7e9},)"
      R"({"path": ")" +
      drive + R"(0", "mixed": 4e9}, {"path": ")" + drive + R"(1", "mixed": 1e9}]})");
  config.storage.paths[1] += "/../drive1/.";  // another name for the same folder
  EXPECT_EQ(storage_weights(config.storage), (std::vector<double>{4e9, 1e9, 2e9}));
}

TEST_F(Striped, ACalibrationThatDoesNotHelpIsRefusedWithTheCommandThatMends) {
  Config config = config_for({1, 1});
  config.storage.weights.clear();
  const std::string drive = std::filesystem::canonical(directory_.path()).string() + "/drive";
  struct Case {
    std::string text;
    const char* why;
  };
  for (const Case& bad :
       {Case{"", "is not a calibration"}, Case{"[1]", "is not a calibration"},
        Case{R"({"format": "sluice-io-calibration-1", "processor": )" + std::string(400'000, '[') +
                 std::string(400'000, ']') + "}",
             "is not a calibration"},
        Case{R"({"format": "sluice-io-calibration-0", "drives": []})", "is not a calibration"},
        Case{R"({"format": "sluice-io-calibration-1"})", "no rate"},
        Case{R"({"format": "sluice-io-calibration-1", "drives": [7, {"path": 3}]})", "no rate"},
        Case{R"({"format": "sluice-io-calibration-1", "drives": [{"path": ")" + drive +
                 R"(0", "mixed": 1}, {"path": ")" + drive + R"(1", "read": 1}]})",
             "drive1"},
        Case{R"({"format": "sluice-io-calibration-1", "drives": [{"path": ")" + drive +
                 R"(0", "mixed": 1}, {"path": ")" + drive + R"(1", "mixed": -1}]})",
             "drive1"}}) {
    config.storage.calibration = write_calibration(bad.text);
    const std::string message =
        expect_error(ErrorCode::kInput, [&] { (void)storage_weights(config.storage); });
    EXPECT_NE(message.find(bad.why), std::string::npos) << message;
    EXPECT_NE(message.find("sluice bench io --path " + config.storage.paths[0]), std::string::npos)
        << message;
    EXPECT_NE(message.find(config.storage.calibration), std::string::npos) << message;
  }
  config.storage.calibration = directory_.file("missing.json");
  const std::string message =
      expect_error(ErrorCode::kInput, [&] { (void)storage_weights(config.storage); });
  EXPECT_NE(message.find("cannot be read"), std::string::npos) << message;
}

TEST_F(Striped, ACalibrationOfAnotherMachineIsRefusedByName) {
  const std::string& here = topology().processor;
  if (here.empty()) GTEST_SKIP() << "the processor has no name here";
  Config config = config_for({1});
  config.storage.weights.clear();
  const std::string drive = std::filesystem::canonical(directory_.path()).string() + "/drive0";
  const auto calibrate = [&](const std::string& processor) {
    config.storage.calibration =
        write_calibration(R"({"format": "sluice-io-calibration-1", "processor": ")" + processor +
                          R"(", "drives": [{"path": ")" + drive + R"(", "mixed": 3e9}]})");
  };
  for (const std::string& processor : {here, std::string()}) {  // its own, and an unknown one
    calibrate(processor);
    EXPECT_EQ(storage_weights(config.storage), std::vector<double>{3e9});
  }
  calibrate("PDP-11");
  const std::string message =
      expect_error(ErrorCode::kInput, [&] { (void)storage_weights(config.storage); });
  for (const std::string& part :
       {std::string("is of another machine, whose processor is \"PDP-11\""), "\"" + here + "\"",
        "sluice bench io --path " + config.storage.paths[0]})
    EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST_F(Striped, WeightsThatDoNotFitThePathsAreRefused) {
  for (const auto& weights :
       {std::vector<double>{1}, {1, 2, 3}, {1, 0}, {1, -1}, {1, NAN}, {1, INFINITY}}) {
    Config config = config_for({1, 1});
    config.storage.weights = weights;
    const std::string message = expect_error(ErrorCode::kConfig, [&] { validate(config); });
    EXPECT_NE(message.find("storage.weights"), std::string::npos) << message;
  }
  Config config = config_for({1, 1});
  config.storage.calibration = "io.json";
  EXPECT_NE(expect_error(ErrorCode::kConfig, [&] { validate(config); }).find("storage.calibration"),
            std::string::npos);
}

}  // namespace
}  // namespace sluice::test
