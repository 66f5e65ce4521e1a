// Stores of an older version, whose records lack some numbers of the config.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <sluice/units.h>
#include "engine/store/commit_record.h"
#include "tests/support/expect_error.h"
#include "tests/support/file_text.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

namespace fs = std::filesystem;

class OlderNumbers : public testing::Test {
 protected:
  OlderNumbers() : config_(toy_config(directory_.path())) {
    config_.storage.state.name = "run-7";
    train(2);
  }

  void train(std::uint32_t steps) const {
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    Engine engine(config_, toy_model(), *device);
    (void)run_toy(engine, toy_model(), *device, config_, {.steps = steps});
    engine.close();
  }
  // Whole records without what has been added since.
  void make_older() const {
    for (const fs::directory_entry& entry : fs::directory_iterator(directory_.path())) {
      if (entry.path().string().find(".commit") == std::string::npos) continue;
      std::string file = file_text(entry.path().string());
      const std::size_t slot_bytes = file.size() / kCommitSlots;
      for (std::size_t slot = 0; slot < kCommitSlots; ++slot) {
        const auto bytes =
            std::as_writable_bytes(std::span(file)).subspan(slot * slot_bytes, slot_bytes);
        CommitReading reading = decode_commit(bytes);
        if (reading.state != CommitState::kWhole) continue;
        nlohmann::json settings = nlohmann::json::parse(reading.record.settings);
        for (const char* const key :
             {"optimizer.clip_epsilon", "optimizer.non_finite", "tensors with weight decay"})
          EXPECT_EQ(settings["config"].erase(key), 1u);
        reading.record.settings = settings.dump();
        encode_commit(reading.record, bytes);
      }
      std::ofstream(entry.path(), std::ios::binary | std::ios::trunc) << file;
    }
  }

  TempDirectory directory_;
  Config config_;
};

TEST_F(OlderNumbers, AreTakenFromTheFirstRunOfThisVersion) {
  make_older();
  config_.optimizer.clip_epsilon = 0.25;
  train(4);
  train(6);
  config_.optimizer.clip_epsilon = 0.5;
  const std::string said = expect_error(ErrorCode::kInput, [&] { train(8); });
  EXPECT_NE(said.find("optimizer.clip_epsilon was 0.25 and is 0.5;"), std::string::npos) << said;
}

}  // namespace
}  // namespace sluice::test
