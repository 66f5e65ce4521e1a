// The application's text in commits is UTF-8, since a checkpoint has no other. Stores of earlier
// versions may have other bytes: they go on, and can be exported.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <sluice/checkpoint.h>
#include "engine/checkpoint/checkpoint_export.h"
#include "engine/checkpoint/store_source.h"
#include "engine/durable/new_store.h"
#include "tests/engine/exactness_cases.h"
#include "tests/support/expect_error.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

constexpr const char* kOther = "position \xff\xfe 7";

class ApplicationText : public testing::Test {
 protected:
  ApplicationText() {
    config_ = toy_config(directory_.path());
    config_.storage.state = {.name = "run", .commit_every = 1};
    config_.optimizer.clip_norm = 0;
  }

  // Such a text can only be there from before.
  void make_old_store(const std::string& text) {
    const InitialValues values = toy_values();
    InitialSource initial(values);
    const std::string texts[] = {text};
    (void)make_store(config_, model_, 1, initial, texts);
  }
  StepReport step(Engine& engine, const FinishOptions& finish) {
    const Stream stream(*device_, "compute");
    Step step = engine.begin_step({.learning_rate = 1e-2});
    walk_step(step, model_, engine, *device_, stream, config_, 1);
    if (!finish.application || *finish.application != "\xff") return step.finish(finish);
    const std::string said =
        expect_error(ErrorCode::kInvalidArgument, [&] { (void)step.finish(finish); });
    EXPECT_NE(said.find("finish: the application's text of 1 B is not UTF-8"), said.npos) << said;
    return step.finish();  // it goes on
  }

  TempDirectory directory_;
  Config config_;
  const ModelSpec model_ = toy_model();
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
};

TEST_F(ApplicationText, OtherBytesAreRefusedWhereTheyAreGiven) {
  {
    Engine engine(config_, model_, *device_);
    const std::string said = expect_error(ErrorCode::kInvalidArgument, [&] {
      (void)engine.open_or_create(toy_values(), {.application = kOther});
    });
    EXPECT_NE(said.find("the application's text of 13 B is not UTF-8"), said.npos) << said;
    EXPECT_TRUE(engine.open_or_create(toy_values(), {.application = "caf\xc3\xa9"}).is_new);
    EXPECT_EQ(step(engine, {.application = "\xff"}).step, 1u);
    engine.close();
  }
  EXPECT_EQ(StoreSource("run", config_.storage.paths).application()[0], "caf\xc3\xa9");
}

TEST_F(ApplicationText, AnOldStoreGoesOnWithOtherBytes) {
  make_old_store(kOther);
  for (std::uint64_t run = 1; run <= 2; ++run) {
    Engine engine(config_, model_, *device_);
    EXPECT_EQ(engine.open_or_create(toy_values()).application, kOther);
    EXPECT_EQ(step(engine, {}).step, 2 * run - 1);
    EXPECT_EQ(step(engine, {.application = kOther}).step, 2 * run);
    engine.close();
  }
}

TEST_F(ApplicationText, AnExportReplacesOtherBytesAndSaysSo) {
  make_old_store(kOther);
  StoreSource source("run", config_.storage.paths);
  const SavedCheckpoint saved =
      export_checkpoint(source, source.run().model, source.run().config,
                        directory_.file("exported"), {}, source.application());
  ASSERT_EQ(saved.notes.size(), 1u);
  EXPECT_NE(saved.notes[0].find("text of rank 0, of 13 B, is not UTF-8"), std::string::npos)
      << saved.notes[0];
  EXPECT_EQ(open_checkpoint(saved.path).application,
            std::vector<std::string>{"position \xEF\xBF\xBD\xEF\xBF\xBD 7"});
}

TEST_F(ApplicationText, AnExportOfATextSaysNothing) {
  make_old_store("caf\xc3\xa9");
  StoreSource source("run", config_.storage.paths);
  EXPECT_TRUE(export_checkpoint(source, source.run().model, source.run().config,
                                directory_.file("exported"), {}, source.application())
                  .notes.empty());
}

}  // namespace
}  // namespace sluice::test
