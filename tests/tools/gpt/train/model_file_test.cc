#include "tools/gpt/train/model_file.h"
#include "tests/support/file_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include "engine/plan/layout.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/tools/gpt/train/small_gpt.h"

namespace sluice {
namespace {

using test::expect_error;
using test::small_gpt;
using test::small_train_config;
using test::SmallGpt;

// Finite values of every kind, among them what rounding, flushing or a sign test would change.
float odd_value(std::uint64_t tensor, std::uint64_t element) {
  constexpr float kSpecial[] = {0.0f,          -0.0f,         0x1p-149f,   -0x1.8p-130f, 0x1p-126f,
                                0x1.fffffep0f, 0x1.7fff8p10f, -0x1.fep90f, 0x1.fep127f,  1.0f};
  if (element % 16 < std::size(kSpecial)) return kSpecial[element % 16];
  // Any bits with an exponent that is neither that of infinity nor close to it.
  const auto hash = static_cast<std::uint32_t>((tensor * 977 + element + 1) * 2654435761u);
  return std::bit_cast<float>(hash & 0xbfffffffu);
}

// The same, with what fp16 has no finite number for made small.
float odd_value(DType precision, std::uint64_t tensor, std::uint64_t element) {
  const float value = odd_value(tensor, element);
  if (precision != DType::kFp16 || std::abs(value) < 65000) return value;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & 0x87ffffffu);
}

InitialValues fill_odd(DType precision) {
  return [=](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = odd_value(precision, index_of(tensor.id), first + i);
  };
}

class ModelFileTest : public testing::Test {
 protected:
  ModelFileTest() {
    for (const UnitSpec& unit : gpt::gpt_model_spec(small_gpt()).units) {
      for (const TensorSpec& tensor : unit.tensors) tensors_.push_back({tensor.name, tensor.shape});
    }
  }

  SavedTensor& tensor(const std::string& name) {
    return *std::ranges::find_if(tensors_, [&](const auto& each) { return each.name == name; });
  }

  std::string write() {
    OutputFile output("--save", path_);
    write_safetensors(output, tensors_, metadata_,
                      [this](std::size_t index, std::uint64_t, std::span<float> values) {
                        std::ranges::fill(
                            values, tensors_[index].name == "lm_head.weight" ? head_value_ : 1);
                      });
    output.commit();
    return path_;
  }

  // As transformers describes the model: two heads of 16 elements each.
  void write_config(const std::string& more = "") {
    std::ofstream(folder_.file("config.json"))
        << R"({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 8, )"
        << R"("vocab_size": 256)" << more << "}";
  }

  std::string expect_refused() {
    const std::string path = write();
    const std::string message =
        expect_error(ErrorCode::kInput, [&] { const ModelFile file(path); });
    EXPECT_NE(message.find(path), std::string::npos) << message;
    return message;
  }

  test::TempDirectory folder_;
  std::string path_ = folder_.file("model.safetensors");
  float head_value_ = 1;  // all others are 1
  std::vector<SavedTensor> tensors_;
  std::map<std::string, std::string> metadata_{
      {"model.layers", "2"},  {"model.heads", "2"},        {"model.embedding", "32"},
      {"model.context", "8"}, {"model.vocabulary", "256"}, {"model.tied_head", "true"}};
};

TEST_F(ModelFileTest, SaveAndInitializeKeepEveryBit) {
  for (const DType precision : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    SmallGpt first(small_train_config(folder_.path(), precision));
    first.engine().initialize(fill_odd(precision));
    OutputFile output("--save", path_);
    save_model(output, small_gpt(), first.engine());
    output.commit();
    const ModelFile file(path_);
    file.require_shape_of(small_gpt());
    SmallGpt second(small_train_config(folder_.path(), precision));
    second.engine().initialize(file.initial_values());
    for (const TensorPlace& place : first.engine().tensors()) {
      for (const StateKind kind :
           {StateKind::kParameter, StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq})
        EXPECT_EQ(second.read(place.id, kind), first.read(place.id, kind)) << place.name;
      std::vector<float> saved(place.element_count);
      file.read(place.name, 0, saved);
      for (std::uint64_t i = 0; i < saved.size(); ++i)
        ASSERT_EQ(std::bit_cast<std::uint32_t>(saved[i]),
                  std::bit_cast<std::uint32_t>(odd_value(precision, index_of(place.id), i)))
            << place.name << " " << i;
    }
    OutputFile again("--save", folder_.file("again"));
    save_model(again, small_gpt(), second.engine());
    again.commit();
    const auto content = [&](const std::string& name) {
      return test::file_text(folder_.file(name));
    };
    EXPECT_TRUE(content("model.safetensors") == content("again"));
  }
}

TEST_F(ModelFileTest, ReadsTheShapeFromTheMetadata) {
  const ModelFile file(write());
  EXPECT_EQ(file.config().layers, 2u);
  EXPECT_EQ(file.config().heads, 2u);
  EXPECT_EQ(file.config().embedding, 32u);
  EXPECT_EQ(file.config().context, 8u);
  EXPECT_EQ(file.config().vocabulary, 256u);
  EXPECT_TRUE(file.config().tied_head);
}

TEST_F(ModelFileTest, ReadsPublishedFilesByTheirShapes) {
  metadata_ = {{"format", "pt"}};
  tensors_.clear();
  for (const UnitSpec& unit :
       gpt::gpt_model_spec(
           {.layers = 3, .heads = 2, .embedding = 128, .context = 16, .vocabulary = 50})
           .units) {
    for (const TensorSpec& each : unit.tensors) tensors_.push_back({each.name, each.shape});
  }
  tensors_.push_back({"h.0.attn.bias", {1, 1, 16, 16}});  // the masks that such files carry
  const ModelFile file(write());
  EXPECT_EQ(file.config().layers, 3u);
  EXPECT_EQ(file.config().heads, 2u);
  EXPECT_EQ(file.config().embedding, 128u);
  EXPECT_EQ(file.config().context, 16u);
  EXPECT_EQ(file.config().vocabulary, 50u);
}

TEST_F(ModelFileTest, AFileIsReadWithTheConfigBesideIt) {
  metadata_ = {{"format", "pt"}};
  write_config();
  const ModelFile file(write());
  const ModelFile folder(folder_.path());
  for (const ModelFile* each : {&file, &folder}) {
    each->require_shape_of(small_gpt());
    EXPECT_FALSE(each->has_guessed_heads());
  }
  write_config(R"(, "activation_function": "relu")");
  for (const std::string& path : {path_, folder_.path()}) {
    const std::string message =
        expect_error(ErrorCode::kInput, [&] { const ModelFile refused(path); });
    EXPECT_NE(message.find("\"activation_function\" is \"relu\""), std::string::npos) << message;
  }
  write_config(R"(, "n_layer": 3)");
  EXPECT_NE(expect_refused().find("h.2."), std::string::npos);
  metadata_ = {{"model.layers", "2"},  {"model.heads", "4"},        {"model.embedding", "32"},
               {"model.context", "8"}, {"model.vocabulary", "256"}, {"model.tied_head", "true"}};
  EXPECT_EQ(ModelFile(write()).config().heads, 4u) << "a model of Sluice says it itself";
}

TEST_F(ModelFileTest, HeadsThatNothingSaysAreAGuess) {
  metadata_ = {};
  // A config of Sluice, which may have comments, is none of the model's.
  for (const char* text : {"", R"({"model": {"layers": 2}})", "// a comment\n{}", "[1]"}) {
    std::filesystem::remove(folder_.file("config.json"));
    if (*text != '\0') std::ofstream(folder_.file("config.json")) << text;
    const ModelFile file(write());
    EXPECT_TRUE(file.has_guessed_heads());
    EXPECT_EQ(file.config().heads, 1u);
    const std::string message =
        expect_error(ErrorCode::kInput, [&] { file.require_shape_of(small_gpt()); });
    EXPECT_NE(message.find("model.heads = 1, with 32 elements each, is a guess; the config says 2; "
                           "put the model's config.json beside it"),
              std::string::npos)
        << message;
  }
}

TEST_F(ModelFileTest, AConfigThatIsCutIsNamedByAFileThatNeedsIt) {
  metadata_ = {};
  std::ofstream(folder_.file("config.json")) << R"({"model_type": "gpt2", "n_layer")";
  const std::string path = write();
  const std::string message =
      expect_error(ErrorCode::kInput, [&] { const ModelFile refused(path); });
  EXPECT_NE(message.find("config.json\" is no JSON"), std::string::npos) << message;
  metadata_ = {{"model.layers", "2"},  {"model.heads", "4"},        {"model.embedding", "32"},
               {"model.context", "8"}, {"model.vocabulary", "256"}, {"model.tied_head", "true"}};
  EXPECT_EQ(ModelFile(write()).config().heads, 4u);
}

TEST_F(ModelFileTest, AHeadThatEqualsTheEmbeddingIsTied) {
  metadata_ = {};
  tensors_.push_back({"lm_head.weight", {256, 32}});
  for (const bool has_config : {false, true}) {
    if (has_config) write_config();
    head_value_ = 1;
    EXPECT_TRUE(ModelFile(write()).config().tied_head);
    head_value_ = 2;
    if (has_config) {
      EXPECT_NE(expect_refused().find("differ"), std::string::npos);
    } else {
      EXPECT_FALSE(ModelFile(write()).config().tied_head);
    }
  }
  head_value_ = 1;
  write_config(R"(, "tie_word_embeddings": false)");
  EXPECT_FALSE(ModelFile(write()).config().tied_head);
}

TEST_F(ModelFileTest, RefusesAMissingTensor) {
  for (const char* name : {"wte.weight", "wpe.weight", "h.1.mlp.c_fc.bias", "ln_f.bias"}) {
    const auto all = tensors_;
    std::erase_if(tensors_, [&](const SavedTensor& each) { return each.name == name; });
    EXPECT_NE(expect_refused().find(name), std::string::npos);
    metadata_.erase("model.layers");
    (void)expect_refused();
    metadata_["model.layers"] = "2";
    tensors_ = all;
  }
}

TEST_F(ModelFileTest, RefusesWrongShapes) {
  for (const char* name : {"wte.weight", "h.0.attn.c_attn.weight", "ln_f.weight"}) {
    const auto all = tensors_;
    tensor(name).shape.push_back(1);
    EXPECT_NE(expect_refused().find(name), std::string::npos);
    metadata_.erase("model.layers");
    (void)expect_refused();
    metadata_["model.layers"] = "2";
    tensors_ = all;
  }
  std::swap(tensor("h.0.mlp.c_fc.weight").shape[0], tensor("h.0.mlp.c_fc.weight").shape[1]);
  EXPECT_NE(expect_refused().find("[128, 32], but the model needs [32, 128]"), std::string::npos);
}

TEST_F(ModelFileTest, RefusesBadMetadata) {
  for (const char* key :
       {"model.layers", "model.heads", "model.embedding", "model.context", "model.vocabulary"}) {
    const std::string right = metadata_[key];
    for (const char* wrong :
         {"", "x", "-1", "0", "2x", "1.5", "4294967295", "4294967296", "9999"}) {
      metadata_[key] = wrong;
      (void)expect_refused();
    }
    metadata_[key] = right;
  }
  metadata_["model.heads"] = "3";  // does not divide 32
  (void)expect_refused();
  metadata_.erase("model.heads");
  EXPECT_NE(expect_refused().find("model.heads"), std::string::npos);
}

TEST_F(ModelFileTest, RefusesAModelOfAnotherShape) {
  const ModelFile file(write());
  const auto refused = [&](gpt::GptConfig wanted) {
    return expect_error(ErrorCode::kInput, [&] { file.require_shape_of(wanted); });
  };
  gpt::GptConfig wanted = small_gpt();
  wanted.layers = 3;
  EXPECT_NE(refused(wanted).find("model.layers = 2, but the config says 3"), std::string::npos);
  wanted = small_gpt();
  wanted.heads = 4;  // no tensor's shape shows it
  EXPECT_NE(refused(wanted).find("model.heads"), std::string::npos);
}

}  // namespace
}  // namespace sluice
