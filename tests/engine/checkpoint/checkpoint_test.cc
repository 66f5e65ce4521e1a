// Portable checkpoints: what is saved by one engine goes on in another with the same bits, files do
// not depend on who wrote them, and what is damaged, foreign or half written is named.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cpu_optim/moment_codec.h"
#include "engine/checkpoint/checkpoint_source.h"
#include "tests/engine/exactness_cases.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/expect_error.h"
#include "tests/support/file_text.h"

namespace sluice::test {
namespace {

namespace fs = std::filesystem;

// The data files, by name: without the manifest, which says who wrote what.
std::map<std::string, std::string> data_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name != kManifestName) files[name] = file_text(entry.path().string());
  }
  return files;
}

void flip(const std::string& path, std::uint64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const auto byte = static_cast<char>(file.get() ^ 0x10);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(byte);
}

class CheckpointTest : public testing::Test {
 protected:
  static Config config_of(const std::string& path, DType parameters) {
    Config config = toy_config(path);
    config.precision = {.parameters = parameters, .gradients = parameters};
    return config;
  }

  // Trains `steps` from where `source` says, or from the start, and saves. Returns the folder.
  std::string train_and_save(const Config& config, const ToyOptions& options,
                             const SaveOptions& save = {}) {
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    const ModelSpec model = toy_model(options.frozen_units);
    Engine engine(config, model, *device);
    result_ = run_toy(engine, model, *device, config, options);
    return engine.save(root_, save).path;
  }

  TempDirectory directory_;
  std::string root_ = directory_.file("checkpoints");
  ToyResult result_;
};

class CheckpointOf : public CheckpointTest, public testing::WithParamInterface<DType> {};

TEST_P(CheckpointOf, APrecisionGoesOnUnderAnotherPlacementWithTheSameBits) {
  for (const std::vector<std::uint32_t>& frozen : {std::vector<std::uint32_t>{}, {1, 4}}) {
    Config before = config_of(directory_.path(), GetParam());
    Config after = before;
    before.placement = {TierChoice::kNvme, TierChoice::kNvme};
    after.placement = {TierChoice::kDevice, TierChoice::kHost};
    after.storage.block_elements = 8192;
    ToyOptions options{.steps = 5, .evaluate = true, .frozen_units = frozen};
    const ToyResult expected = toy_oracle(before, options);
    options.steps = 2;
    const std::string folder = train_and_save(before, options, {.file_bytes_max = 100'000});
    CheckpointSource source(folder);
    source.verify();
    EXPECT_EQ(source.position().step, 2u);
    options.steps = 3;
    options.source = &source;
    const std::string next = train_and_save(after, options);
    EXPECT_TRUE(result_.state == expected.state);
    EXPECT_EQ(CheckpointSource(next).position().step, 5u);
  }
}

INSTANTIATE_TEST_SUITE_P(Precision, CheckpointOf,
                         testing::Values(DType::kBf16, DType::kFp32, DType::kFp16),
                         [](const auto& value) { return std::string(name_of(value.param)); });

TEST_F(CheckpointTest, FilesDoNotDependOnTheRanksThatWriteThem) {
  const Config one = sharded_config(directory_.path(), 3, true, DType::kBf16);
  const std::string folder = train_and_save(one, {.steps = 2});
  const std::map<std::string, std::string> expected = data_of(folder);
  const StateBytes state = result_.state;
  for (const std::uint32_t stage : {0u, 1u, 3u}) {
    SCOPED_TRACE(stage);
    const TempDirectory storage;
    const std::string root = storage.file("checkpoints");
    const Config config = sharded_config(storage.path(), stage, true, DType::kBf16);
    LocalWorld world(3, {.timeout_s = 60, .sum = sum_in_order});
    std::vector<std::string> paths(3);
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        const auto device = make_host_device({.memory_bytes = 64_MiB});
        const auto collectives = world.join(rank, *device);
        try {
          Engine engine(config, toy_model(), *device, collectives.get());
          CheckpointSource source(folder);
          engine.restore(source);
          EXPECT_TRUE(read_state(engine) == state);
          const std::string own = "rank " + std::to_string(rank);
          paths[rank] = engine.save(root, {.application = own}).path;
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
          collectives->abort(error.what());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(paths[0], root + "/step-000000002");
    EXPECT_EQ(paths[2], paths[0]);
    EXPECT_TRUE(data_of(paths[0]) == expected);
    EXPECT_EQ(CheckpointSource(paths[0]).manifest().application,
              (std::vector<std::string>{"rank 0", "rank 1", "rank 2"}));
  }
}

// As other programs read it: weights of the compute type, whole, under the model's own names.
TEST_F(CheckpointTest, WeightsLieInSafetensorsFilesWithAnIndex) {
  const Config config = config_of(directory_.path(), DType::kBf16);
  const std::string folder = train_and_save(config, {.steps = 1}, {.file_bytes_max = 60'000});
  const auto index = nlohmann::json::parse(file_text(folder + "/model.safetensors.index.json"));
  const SafetensorsFile file(folder + "/" + index["weight_map"]["h.1.fc"].get<std::string>());
  const SafetensorsFile::Entry* const entry = file.find("h.1.fc");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->dtype, "BF16");
  EXPECT_EQ(entry->shape, (std::vector<std::uint64_t>{107, 211}));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  Engine engine(config, toy_model(), *device);
  CheckpointSource source(folder);
  engine.restore(source);
  std::vector<std::byte> expected(entry->size_bytes);
  std::vector<std::byte> actual(entry->size_bytes);
  for (const TensorPlace& tensor : engine.tensors()) {
    if (tensor.name == "h.1.fc") engine.read_state(tensor.id, StateKind::kParameter, 0, expected);
  }
  file.read_bytes(*entry, 0, actual);
  EXPECT_TRUE(actual == expected);
}

TEST_F(CheckpointTest, OnlyTheSameStateIsReplaced) {
  const Config config = config_of(directory_.path(), DType::kFp32);
  Config other = config;
  other.optimizer.adam.beta1 = 0.5;
  const std::string first = train_and_save(config, {.steps = 2});
  const std::string second = train_and_save(other, {.steps = 2});
  EXPECT_TRUE(second.ends_with("step-000000002.1")) << second;
  CheckpointSource(first).verify();
  EXPECT_EQ(train_and_save(other, {.steps = 2}), root_ + "/step-000000002.2");
  EXPECT_FALSE(fs::exists(second));
  CheckpointSource(first).verify();
  const std::string frozen = train_and_save(config, {.steps = 3, .frozen_units = {1}}, {.keep = 1});
  EXPECT_FALSE(fs::exists(first)) << "the same tensors, and two too many";
  ModelSpec lines;
  lines.units.push_back({"line", {{.name = "line", .shape = {8}}}});
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  Engine engine(config, lines, *device);
  engine.initialize([](const TensorPlace&, std::uint64_t, std::span<float> values) {
    std::ranges::fill(values, 1.0f);
  });
  EXPECT_EQ(engine.save(root_, {.keep = 1}).notes, std::vector<std::string>{});
  CheckpointSource(frozen).verify();
  fs::rename(frozen, root_ + "/step-000000000.7");
  EXPECT_EQ(engine.save(root_, {.keep = 1}).notes.size(), 1u);
  CheckpointSource(root_ + "/step-000000000.7").verify();
}

TEST_F(CheckpointTest, ALossScaleGoesWithIt) {
  Config config = config_of(directory_.path(), DType::kFp16);
  config.precision.loss_scale = {.static_scale = 0, .initial_scale_power = 3, .window = 2};
  const std::string folder = train_and_save(config, {.steps = 3});
  const CheckpointSource source(folder);
  EXPECT_EQ(source.position().loss_scale,
            (LossScaleState{.scale = 16, .hysteresis_left = 2, .good_steps = 1}));
}

class DamagedCheckpoint : public CheckpointTest {
 protected:
  void SetUp() override { folder_ = train_and_save(config_, {.steps = 1}); }
  std::string file(const std::string& name) const { return folder_ + "/" + name; }
  // Opens it, restores from it, and returns the message.
  std::string fail(ErrorCode code) {
    const auto before = data_of(folder_);
    const std::string message = expect_error(code, [&] {
      CheckpointSource source(folder_, precision_);
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      Engine engine(config_, model_, *device);
      engine.restore(source);
    });
    EXPECT_TRUE(data_of(folder_) == before);
    return message;
  }
  void expect_words(const std::string& message, std::initializer_list<const char*> words) {
    for (const char* word : words)
      EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
  }
  void rewrite(const std::string& from, const std::string& to) {
    std::string text = file_text(file("sluice_state.json"));
    const std::size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    std::ofstream(file("sluice_state.json")) << text.replace(at, from.size(), to);
  }

  Config config_ = config_of(directory_.path(), DType::kBf16);
  ModelSpec model_ = toy_model();
  CheckpointPrecision precision_ = CheckpointPrecision::kAsSaved;
  std::string folder_;
  const std::string weights_ = "model-00001-of-00001.safetensors";
  const std::string moments_ = "optimizer-00001-of-00001.safetensors";
  const char* const help_ = "; use another checkpoint (`sluice train --resume` takes the newest";
};

TEST_F(DamagedCheckpoint, FlippedBitsAreFoundWhereverTheyAre) {
  for (const std::string& name : {weights_, moments_}) {
    const std::uint64_t size = fs::file_size(file(name));
    for (const std::uint64_t at : {size / 2, size - 1}) {
      flip(file(name), at);
      expect_words(fail(ErrorCode::kDamaged), {name.c_str(), "the checksum is", "expected", help_});
      flip(file(name), at);
    }
  }
  flip(file(weights_), 41);  // a letter of the first name in the header
  expect_words(fail(ErrorCode::kDamaged), {weights_.c_str(), "header", help_});
}

TEST_F(DamagedCheckpoint, AManifestThatWasChangedIsFound) {
  rewrite("\"step\":1", "\"step\":2");
  expect_words(fail(ErrorCode::kDamaged), {"sluice_state.json", "\"checksum\"", help_});
}

// Nothing says whose it is, and it must not take the place of one that is whole.
TEST_F(DamagedCheckpoint, OneWithADamagedManifestStaysAndDoesNotCount) {
  const std::string damaged = train_and_save(config_, {.steps = 2}, {.keep = 0});
  flip(damaged + "/sluice_state.json", 100);
  (void)train_and_save(config_, {.steps = 3}, {.keep = 2});
  EXPECT_TRUE(fs::exists(damaged));
  CheckpointSource(folder_).verify();
}

// The checksum comes behind it, and text functions of JSON call themselves for each level.
TEST_F(DamagedCheckpoint, AManifestOfAMillionLevelsIsDamaged) {
  rewrite("{", R"({"a":)" + std::string(1'000'000, '[') + std::string(1'000'000, ']') + ",");
  expect_words(fail(ErrorCode::kDamaged), {"sluice_state.json", "not a JSON object", help_});
}

TEST_F(DamagedCheckpoint, MomentsOfAnotherTypeAreNamed) {
  CheckpointManifest manifest = CheckpointSource(folder_).manifest();
  std::ranges::find(manifest.stored, CheckpointPart::kExpAvgSq, &CheckpointManifest::Stored::part)
      ->dtype = "BF16";
  std::ofstream(file("sluice_state.json")) << manifest_text(manifest);
  expect_words(fail(ErrorCode::kInput), {"\"BF16\"", "exp_avg_sq", "expected \"F32\"", help_});
}

TEST_F(DamagedCheckpoint, AForeignOrCutManifestIsNamedWithItsField) {
  rewrite("sluice checkpoint", "other checkpoint");
  expect_words(fail(ErrorCode::kInput), {"sluice_state.json", "\"format\"", "other", help_});
  rewrite("other checkpoint", "sluice checkpoint");
  rewrite("\"version\":1", "\"version\":9");
  expect_words(fail(ErrorCode::kInput), {"\"version\"", "9", "expected 1", help_});
  fs::resize_file(file("sluice_state.json"), 100);
  expect_words(fail(ErrorCode::kDamaged), {"sluice_state.json", "100 bytes", help_});
  fs::remove(file("sluice_state.json"));
  expect_words(fail(ErrorCode::kInput), {"sluice_state.json"});
}

TEST_F(DamagedCheckpoint, CutAndMissingFilesAreNamed) {
  const std::uint64_t size = fs::file_size(file(moments_));
  fs::resize_file(file(moments_), size + 1);
  expect_words(fail(ErrorCode::kDamaged), {moments_.c_str(), "bytes, expected", help_});
  fs::resize_file(file(moments_), size - 1);
  expect_words(fail(ErrorCode::kInput), {moments_.c_str(), help_});
  fs::remove(file(moments_));
  expect_words(fail(ErrorCode::kInput), {moments_.c_str(), help_});
}

TEST_F(DamagedCheckpoint, AnotherModelIsRefused) {
  model_.units[2].tensors[0].shape = {3};
  expect_words(fail(ErrorCode::kInput), {"h.1.ln", "[107]", "[3]", "`sluice train"});
  model_ = toy_model();
  model_.units[2].tensors[0].name = "other";
  expect_words(fail(ErrorCode::kInput), {"\"other\""});
  model_ = toy_model();
  model_.units[2].tensors.pop_back();
  expect_words(fail(ErrorCode::kInput), {"h.1.bias"});
  model_ = toy_model({2});
  expect_words(fail(ErrorCode::kInput), {"frozen", "--convert"});
  model_ = toy_model();
  config_.optimizer.kind = OptimizerKind::kLion;
  expect_words(fail(ErrorCode::kInput), {"optimizer.type", "adamw", "lion", "initialize()"});
}

TEST_F(DamagedCheckpoint, AnotherPrecisionNeedsToBeAskedFor) {
  config_.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  expect_words(fail(ErrorCode::kInput),
               {"precision", "bf16", "fp32", "--convert", "CheckpointPrecision::kConvert"});
  CheckpointSource source(folder_, CheckpointPrecision::kConvert);
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  Engine engine(config_, model_, *device);
  engine.restore(source);
  CheckpointSource exact(folder_);
  for (const TensorPlace& tensor : engine.tensors()) {
    std::vector<float> actual(tensor.element_count);
    std::vector<float> expected(tensor.element_count);
    engine.read_state(tensor.id, StateKind::kMaster, 0, std::as_writable_bytes(std::span(actual)));
    exact.read(tensor, StateKind::kMaster, 0, expected);
    EXPECT_EQ(actual, expected);
  }
}

// Their moments begin with zeros, so their bias correction begins with step 1.
TEST_F(DamagedCheckpoint, UnitsThatWereFrozenBeginAtTheirOwnFirstUpdate) {
  const std::string was_frozen =
      train_and_save(config_, {.steps = 40, .frozen_units = {1, 4}}, {.keep = 0});
  const auto masters = [](StateSource& from, const TensorPlace& tensor) {
    std::vector<float> values(tensor.element_count);
    from.read(tensor, StateKind::kMaster, 0, values);
    return values;
  };
  CheckpointSource source(was_frozen, CheckpointPrecision::kConvert);
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  config_.optimizer.adam.weight_decay = 0;
  Engine engine(config_, model_, *device);
  (void)run_toy(engine, model_, *device, config_,
                {.steps = 1, .learning_rate = 1e-3, .source = &source});
  CheckpointSource after(engine.save(root_, {}).path);
  EXPECT_EQ(after.position().step, 41u);
  for (const TensorPlace& tensor : engine.tensors()) {
    const auto updates = after.position().tensor_updates;
    const std::uint32_t unit = index_of(tensor.unit);
    const bool has_begun = unit == 1 || unit == 4;
    EXPECT_EQ(updates.contains(tensor.name), has_begun) << tensor.name;
    if (!has_begun) continue;
    EXPECT_EQ(updates.at(tensor.name), 1u);
    const std::vector<float> was = masters(source, tensor), is = masters(after, tensor);
    for (std::size_t i = 0; i < was.size(); ++i)
      ASSERT_LE(std::abs(is[i] - was[i]), 1.01e-3f) << "Adam's first step is the learning rate";
  }
}

// Moments of the other kind are taken over when that is asked for, as what 8 bits give of them.
TEST_F(DamagedCheckpoint, AnotherStateNeedsToBeAskedFor) {
  config_.optimizer.state = OptimizerState::k8bit;
  expect_words(fail(ErrorCode::kInput), {"optimizer.state", "is fp32", "--convert", "to 8bit"});
  CheckpointSource source(folder_, CheckpointPrecision::kConvert);
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  Engine engine(config_, model_, *device);
  engine.restore(source);
  CheckpointSource exact(folder_);
  for (const TensorPlace& tensor : engine.tensors()) {
    for (const StateKind kind : {StateKind::kExpAvg, StateKind::kExpAvgSq}) {
      std::vector<float> actual(tensor.element_count);
      std::vector<float> expected(tensor.element_count);
      engine.read_state(tensor.id, kind, 0, std::as_writable_bytes(std::span(actual)));
      exact.read(tensor, kind, 0, expected);
      const std::vector<float> given = expected;
      const CodeBook book = kind == StateKind::kExpAvg ? CodeBook::kSigned : CodeBook::kUnsigned;
      std::vector<std::uint8_t> codes(expected.size());
      std::vector<float> scales(expected.size() / 256 + 1);
      const MomentCodes moment{.codes = codes.data(), .scales = scales.data()};
      encode_moments_reference(book, expected, moment);
      decode_moments(book, moment, 0, expected);
      // A single value may be one that codes can mean.
      EXPECT_TRUE(actual == expected || (expected.size() == 1 && actual == given)) << tensor.name;
    }
  }
  const SavedCheckpoint saved = engine.save(directory_.path(), {.application = ""});
  expect_words(file_text(saved.path + "/sluice_state.json"), {"\"state\":\"8bit\""});
  config_.optimizer.state = OptimizerState::kFp32;
  CheckpointSource other(saved.path);
  Engine fp32(config_, model_, *device);
  const std::string refusal = expect_error(ErrorCode::kInput, [&] { fp32.restore(other); });
  expect_words(refusal, {"optimizer.state", "is 8bit", "fp32", "--convert"});
}

}  // namespace
}  // namespace sluice::test
