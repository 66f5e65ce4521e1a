// The detached optimizer and the checkpoints through the C interface.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "tests/capi/capi_support.h"
#include "tests/support/fork_quietly.h"

namespace sluice::test {
namespace {

class CApiOptimizer : public CApi {
 protected:
  ~CApiOptimizer() override { sluice_optimizer_destroy(optimizer_); }

  void make_optimizer(const char* place = "nvme") {
    const std::string text = R"({"optimizer": {"type": "adamw"}, "placement": {"optimizer": ")" +
                             std::string(place) + R"("}, "memory": {"host": "4MiB"},
                              "storage": {"paths": [")" +
                             directory_.path() + R"("]}})";
    const sluice_optimizer_tensor tensors[] = {{"weight", 100'000, SLUICE_FP32, 0},
                                               {"half", 100, SLUICE_BF16, 0},
                                               {"nothing", 0, SLUICE_FP32, 0}};
    ASSERT_EQ(sluice_optimizer_create(text.c_str(), tensors, 3, &optimizer_), SLUICE_OK)
        << sluice_last_error();
  }

  sluice_update update(std::uint64_t step) {
    return adam_update(weight_.data(), gradient_.data(), step);
  }

  sluice_optimizer_report report() {
    sluice_optimizer_report made{};
    EXPECT_EQ(sluice_optimizer_describe(optimizer_, &made), SLUICE_OK) << sluice_last_error();
    return made;
  }

  sluice_optimizer* optimizer_ = nullptr;
  std::vector<float> weight_ = std::vector<float>(100'000, 1.0f);
  std::vector<float> gradient_ = std::vector<float>(100'000, 0.5f);
};

TEST_F(CApiOptimizer, UpdatesReadsAndWrites) {
  make_optimizer();
  for (std::uint64_t step = 1; step <= 3; ++step) {
    const sluice_update made = update(step);
    ASSERT_EQ(sluice_optimizer_begin(optimizer_, &made, 1), SLUICE_OK) << sluice_last_error();
    ASSERT_EQ(sluice_optimizer_wait(optimizer_, step == 2 ? SLUICE_ALL_TENSORS : 0), SLUICE_OK)
        << sluice_last_error();
    // A constant gradient moves each weight by the learning rate.
    for (const float weight : weight_)
      ASSERT_NEAR(weight, 1 - 0.01 * static_cast<double>(step), 1e-6);
  }
  ASSERT_EQ(sluice_optimizer_wait_all(optimizer_), SLUICE_OK);
  std::vector<float> moment(100'000);
  ASSERT_EQ(sluice_optimizer_read(optimizer_, 0, SLUICE_EXP_AVG, 0, moment.size(), moment.data()),
            SLUICE_OK);
  for (const float value : moment) ASSERT_NEAR(value, 0.5 * (1 - 0.9 * 0.9 * 0.9), 1e-6);
  moment[99'999] = 7;
  ASSERT_EQ(
      sluice_optimizer_write(optimizer_, 0, SLUICE_EXP_AVG, 99'999, 1, moment.data() + 99'999),
      SLUICE_OK);
  float back = 0;
  ASSERT_EQ(sluice_optimizer_read(optimizer_, 0, SLUICE_EXP_AVG, 99'999, 1, &back), SLUICE_OK);
  EXPECT_EQ(back, 7);
  const sluice_optimizer_report made = report();
  EXPECT_EQ(made.updated_elements, 300'000u);
  EXPECT_EQ(made.pending_tensors, 0u);
  EXPECT_GT(made.nvme_bytes, 800'000u);
  EXPECT_LE(made.host_bytes, 4u << 20);
  EXPECT_EQ(made.pass_bytes, made.nvme_bytes);
}

// The 16 bits that it has made of the master, whatever the program has made of the parameter since.
TEST_F(CApiOptimizer, TheParameterIsAsTheLastUpdateLeftIt) {
  make_optimizer();
  std::vector<std::uint16_t> half(100, 0x3f80);  // 1 in bf16
  sluice_update made = update(1);
  made.tensor = 1;
  made.parameter = half.data();
  ASSERT_EQ(sluice_optimizer_begin(optimizer_, &made, 1), SLUICE_OK) << sluice_last_error();
  ASSERT_EQ(sluice_optimizer_wait_all(optimizer_), SLUICE_OK);
  EXPECT_NE(half[99], 0x3f80);
  const float left = std::bit_cast<float>(static_cast<std::uint32_t>(half[99]) << 16);
  half[99] = 0x4000;
  float kept = 0;
  ASSERT_EQ(sluice_optimizer_read(optimizer_, 1, SLUICE_PARAMETER, 99, 1, &kept), SLUICE_OK);
  EXPECT_EQ(kept, left);
}

TEST_F(CApiOptimizer, NamesATensorThatIsNotFiniteOnce) {
  make_optimizer("host");
  const char* note = nullptr;
  do ASSERT_EQ(sluice_optimizer_note(optimizer_, &note), SLUICE_OK);
  while (note != nullptr);
  gradient_[5] = std::nanf("");
  const sluice_update made = update(1);
  ASSERT_EQ(sluice_optimizer_begin(optimizer_, &made, 1), SLUICE_OK);
  ASSERT_EQ(sluice_optimizer_wait_all(optimizer_), SLUICE_OK);
  ASSERT_EQ(sluice_optimizer_note(optimizer_, &note), SLUICE_OK);
  ASSERT_NE(note, nullptr);
  EXPECT_EQ(std::string(note), "an update has left \"weight\" with an infinity or a NaN");
  ASSERT_EQ(sluice_optimizer_note(optimizer_, &note), SLUICE_OK);
  EXPECT_EQ(note, nullptr);
}

TEST_F(CApiOptimizer, RefusesBadInput) {
  make_optimizer();
  const auto refused = [](sluice_status status, const char* words) {
    EXPECT_EQ(status, SLUICE_INVALID_ARGUMENT) << sluice_last_error();
    EXPECT_NE(std::string(sluice_last_error()).find(words), std::string::npos)
        << sluice_last_error();
  };
  sluice_update made = update(1);
  made.gradient_type = 9;
  refused(sluice_optimizer_begin(optimizer_, &made, 1), "type 9 is not a sluice_type");
  made = update(1);
  made.tensor = 3;
  refused(sluice_optimizer_begin(optimizer_, &made, 1), "tensor 3 does not exist");
  refused(sluice_optimizer_begin(optimizer_, nullptr, 1), "updates is null");
  refused(sluice_optimizer_begin(nullptr, &made, 1), "is null");
  float value = 0;
  refused(sluice_optimizer_read(optimizer_, 0, 7, 0, 1, &value), "kind is 7");
  refused(sluice_optimizer_read(optimizer_, 0, SLUICE_MASTER, 0, 1, &value), "fp32");
  refused(sluice_optimizer_read(optimizer_, 0, SLUICE_PARAMETER, 0, 1, &value), "fp32");
  refused(sluice_optimizer_read(optimizer_, 0, SLUICE_EXP_AVG, 0, 1, nullptr), "null");
  refused(sluice_optimizer_write(optimizer_, 1, SLUICE_PARAMETER, 0, 1, &value), "\"half\"");
  refused(sluice_optimizer_write(optimizer_, 0, SLUICE_EXP_AVG, 99'999, 2, &value), "100000");
  refused(sluice_optimizer_describe(optimizer_, nullptr), "null");
  sluice_optimizer* other = nullptr;
  EXPECT_EQ(sluice_optimizer_create("{}", nullptr, 0, &other), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(other, nullptr);
  const pid_t child = fork_quietly();
  if (child == 0) {
    const bool is_refused = sluice_optimizer_wait_all(optimizer_) == SLUICE_FORKED;
    sluice_optimizer_destroy(optimizer_);
    _exit(is_refused ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(CApiOptimizer, NegativeSquaresAreRefused) {
  make_optimizer();
  const float values[] = {1, -0.0f, -0.5f};
  EXPECT_EQ(sluice_optimizer_write(optimizer_, 0, SLUICE_EXP_AVG_SQ, 5, 3, values),
            SLUICE_INVALID_ARGUMENT);
  const std::string message = sluice_last_error();
  EXPECT_NE(message.find("tensor \"weight\" at element 7 is -0.5; it must be at least 0"),
            std::string::npos)
      << message;
  float kept = 2;
  EXPECT_EQ(sluice_optimizer_read(optimizer_, 0, SLUICE_EXP_AVG_SQ, 5, 1, &kept), SLUICE_OK);
  EXPECT_EQ(kept, 0) << "the refused values have been written";
  EXPECT_EQ(sluice_optimizer_write(optimizer_, 0, SLUICE_EXP_AVG_SQ, 5, 2, values), SLUICE_OK)
      << sluice_last_error();
  EXPECT_EQ(sluice_optimizer_write(optimizer_, 0, SLUICE_EXP_AVG, 5, 3, values), SLUICE_OK)
      << sluice_last_error();
}

// Updates make such moments of large gradients, and a checkpoint has to bring them back.
TEST_F(CApiOptimizer, InfiniteMomentsComeBack) {
  make_optimizer();
  const float infinity = std::numeric_limits<float>::infinity();
  const float values[] = {infinity, std::nanf(""), -infinity};
  for (const auto& [kind, count] : {std::pair{SLUICE_EXP_AVG, 3}, {SLUICE_EXP_AVG_SQ, 2}}) {
    const auto size = static_cast<std::uint64_t>(count);
    ASSERT_EQ(sluice_optimizer_write(optimizer_, 0, kind, 5, size, values), SLUICE_OK)
        << sluice_last_error();
    float read[3] = {};
    ASSERT_EQ(sluice_optimizer_read(optimizer_, 0, kind, 5, size, read), SLUICE_OK);
    EXPECT_EQ(read[0], infinity);
    EXPECT_TRUE(std::isnan(read[1]));
    if (count == 3) {
      EXPECT_EQ(read[2], -infinity);
    }
  }
}

// A caller of a wrong range need not have memory of that size.
TEST_F(CApiOptimizer, ARangeIsCheckedBeforeTheSourceIsRead) {
  make_optimizer();
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* const pages =
      mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(mprotect(static_cast<std::byte*>(pages) + page, page, PROT_NONE), 0);
  const float* const last = static_cast<float*>(pages) + page / sizeof(float) - 1;
  for (const int kind : {SLUICE_EXP_AVG, SLUICE_EXP_AVG_SQ}) {
    const auto refused = [&](std::uint32_t tensor, std::uint64_t first, std::uint64_t count,
                             const char* words) {
      EXPECT_EQ(sluice_optimizer_write(optimizer_, tensor, kind, first, count, last),
                SLUICE_INVALID_ARGUMENT);
      EXPECT_NE(std::string(sluice_last_error()).find(words), std::string::npos)
          << sluice_last_error();
    };
    refused(0, 99'999, 2, "[99999, +2) of tensor \"weight\", which has 100000");
    refused(0, 0, 1ull << 60, "which has 100000");
    refused(99, 0, 2, "tensor 99 does not exist");
  }
  EXPECT_EQ(munmap(pages, 2 * page), 0);
}

class CApiCheckpoint : public CApi {
 protected:
  void train(int steps) {
    for (int i = 0; i < steps; ++i) {
      ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK) << sluice_last_error();
      walk();
      sluice_step_report report{};
      ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
    }
  }
};

TEST_F(CApiCheckpoint, GoesOnWithTheSameBits) {
  make();
  train(3);
  const std::string root = directory_.file("saved");
  std::filesystem::create_directory(root);
  ASSERT_EQ(sluice_save(engine_, root.c_str(), 0, "position 17"), SLUICE_OK) << sluice_last_error();
  const char* text = nullptr;
  ASSERT_EQ(sluice_saved_path(engine_, &text), SLUICE_OK);
  const std::string folder = text;
  EXPECT_EQ(folder.find(root), 0u);
  train(2);
  const std::vector<float> expected = master(0, 5000);
  sluice_engine_destroy(engine_);
  engine_ = nullptr;

  const sluice_model made = model();
  ASSERT_EQ(sluice_engine_create(config().c_str(), &made, &engine_), SLUICE_OK);
  EXPECT_EQ(sluice_restore(engine_, "/nowhere", 0), SLUICE_INPUT);
  ASSERT_EQ(sluice_restore(engine_, folder.c_str(), 0), SLUICE_OK) << sluice_last_error();
  ASSERT_EQ(sluice_application_text(engine_, &text), SLUICE_OK);
  EXPECT_EQ(std::string(text), "position 17");
  std::uint64_t step = 0;
  ASSERT_EQ(sluice_applied_step(engine_, &step), SLUICE_OK);
  EXPECT_EQ(step, 3u);
  train(2);
  EXPECT_EQ(master(0, 5000), expected);
}

TEST_F(CApiCheckpoint, OneOfAnotherPrecisionIsConvertedOnDemand) {
  make();
  train(2);
  const std::string root = directory_.file("saved");
  std::filesystem::create_directory(root);
  ASSERT_EQ(sluice_save(engine_, root.c_str(), 0, nullptr), SLUICE_OK) << sluice_last_error();
  const std::vector<float> expected = master(0, 5000);
  sluice_engine_destroy(engine_);
  engine_ = nullptr;

  std::string rounded = config();
  rounded.replace(rounded.find("fp32"), 4, "bf16");
  const sluice_model made = model();
  ASSERT_EQ(sluice_engine_create(rounded.c_str(), &made, &engine_), SLUICE_OK);
  const std::string folder = root + "/latest";
  EXPECT_EQ(sluice_restore(engine_, folder.c_str(), 0), SLUICE_INPUT);
  EXPECT_NE(std::string(sluice_last_error()).find("\"precision\" is fp32"), std::string::npos)
      << sluice_last_error();
  ASSERT_EQ(sluice_restore(engine_, folder.c_str(), 1), SLUICE_OK) << sluice_last_error();
  EXPECT_EQ(master(0, 5000), expected);
}

TEST_F(CApiCheckpoint, OneThatIsWrittenBesideTrainingHasItsStep) {
  make();
  const std::string root = directory_.file("saved");
  std::filesystem::create_directory(root);
  EXPECT_EQ(sluice_begin_save(engine_, root.c_str(), 0, nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error()).find("memory.save_buffers"), std::string::npos);
  sluice_engine_destroy(engine_);
  engine_ = nullptr;
  std::string beside = config();
  beside.replace(beside.find("\"memory\": {"), 11, R"("memory": {"save_buffers": 2, )");
  const sluice_model made = model();
  ASSERT_EQ(sluice_engine_create(beside.c_str(), &made, &engine_), SLUICE_OK)
      << sluice_last_error();
  ASSERT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_OK);
  train(2);
  const std::vector<float> expected = master(0, 5000);
  int has_one = 1;
  ASSERT_EQ(sluice_finish_save(engine_, &has_one), SLUICE_OK);
  EXPECT_EQ(has_one, 0) << "nothing is under way";
  ASSERT_EQ(sluice_begin_save(engine_, root.c_str(), 0, "position 17"), SLUICE_OK)
      << sluice_last_error();
  train(2);
  EXPECT_NE(master(0, 5000), expected);
  ASSERT_EQ(sluice_poll_save(engine_, &has_one), SLUICE_OK) << sluice_last_error();
  if (has_one == 0) {
    ASSERT_EQ(sluice_finish_save(engine_, &has_one), SLUICE_OK) << sluice_last_error();
  }
  EXPECT_EQ(has_one, 1);
  const char* text = nullptr;
  ASSERT_EQ(sluice_saved_path(engine_, &text), SLUICE_OK);
  const std::string folder = text;
  EXPECT_EQ(folder, root + "/step-000000002");
  ASSERT_EQ(sluice_poll_save(engine_, &has_one), SLUICE_OK);
  EXPECT_EQ(has_one, 0) << "it is returned once";
  EXPECT_EQ(sluice_poll_save(engine_, nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_begin_save(engine_, nullptr, 0, nullptr), SLUICE_INVALID_ARGUMENT);
  sluice_engine_destroy(engine_);
  engine_ = nullptr;

  ASSERT_EQ(sluice_engine_create(config().c_str(), &made, &engine_), SLUICE_OK);
  ASSERT_EQ(sluice_restore(engine_, folder.c_str(), 0), SLUICE_OK) << sluice_last_error();
  EXPECT_EQ(master(0, 5000), expected);
  ASSERT_EQ(sluice_application_text(engine_, &text), SLUICE_OK);
  EXPECT_EQ(std::string(text), "position 17");
}

TEST_F(CApiCheckpoint, ADurableStoreGoesOnWithTheSameBits) {
  std::string durable = config();
  durable.replace(durable.rfind("}}"), 2, R"(, "state": {"name": "run"}}})");
  const sluice_model made = model();
  int is_new = 0;
  int has_one = 1;
  std::uint64_t step = 0;
  ASSERT_EQ(sluice_engine_create(durable.c_str(), &made, &engine_), SLUICE_OK)
      << sluice_last_error();
  ASSERT_EQ(sluice_committed_step(engine_, &step, &has_one), SLUICE_OK);
  EXPECT_EQ(has_one, 0);
  ASSERT_EQ(sluice_open_or_create(engine_, sine_values, nullptr, 0, &is_new), SLUICE_OK)
      << sluice_last_error();
  EXPECT_EQ(is_new, 1);
  const std::string longest(std::size_t{1} << 20, 'x');
  EXPECT_EQ(sluice_set_application(engine_, longest.c_str()), SLUICE_OK);
  ASSERT_EQ(sluice_set_application(engine_, "position 3"), SLUICE_OK);
  EXPECT_EQ(sluice_set_application(engine_, (longest + "x").c_str()), SLUICE_INVALID_ARGUMENT);
  EXPECT_STREQ(sluice_last_error(),
               "sluice_set_application: the text has 1048577 B, but a commit has room for "
               "1048576 B; keep larger data in a file, and its path here");
  train(3);
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  EXPECT_EQ(sluice_commit_now(engine_), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error()).find("active"), std::string::npos);
  ASSERT_EQ(sluice_abandon_step(engine_), SLUICE_OK);
  ASSERT_EQ(sluice_commit_now(engine_), SLUICE_OK);
  ASSERT_EQ(sluice_committed_step(engine_, &step, &has_one), SLUICE_OK);
  EXPECT_EQ(step, 3u);
  const std::vector<float> expected = master(0, 5000);
  sluice_engine_destroy(engine_);
  engine_ = nullptr;

  ASSERT_EQ(sluice_engine_create(durable.c_str(), &made, &engine_), SLUICE_OK);
  EXPECT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_INVALID_ARGUMENT);
  ASSERT_EQ(sluice_open_or_create(engine_, sine_values, nullptr, 0, &is_new), SLUICE_OK)
      << sluice_last_error();
  EXPECT_EQ(is_new, 0);
  const char* text = nullptr;
  ASSERT_EQ(sluice_application_text(engine_, &text), SLUICE_OK);
  EXPECT_EQ(std::string(text), "position 3");
  EXPECT_EQ(master(0, 5000), expected);
  EXPECT_EQ(sluice_open_or_create(engine_, nullptr, nullptr, 0, &is_new), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_set_application(engine_, "a\xff"), SLUICE_INVALID_ARGUMENT);
  EXPECT_STREQ(sluice_last_error(),
               "sluice_set_application: the text of 2 B is not UTF-8, as the text of a checkpoint "
               "has to be; give other data as text, such as base64");
  EXPECT_EQ(sluice_set_application(engine_, nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_committed_step(engine_, nullptr, &has_one), SLUICE_INVALID_ARGUMENT);
}

TEST_F(CApiCheckpoint, RefusesBadInput) {
  make();
  EXPECT_EQ(sluice_save(engine_, nullptr, 0, nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_restore(engine_, nullptr, 0), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_saved_path(engine_, nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_application_text(engine_, nullptr), SLUICE_INVALID_ARGUMENT);
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  EXPECT_EQ(sluice_save(engine_, directory_.path().c_str(), 0, nullptr), SLUICE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace sluice::test
