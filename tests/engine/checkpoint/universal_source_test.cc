// Universal checkpoints of DeepSpeed, in files that torch wrote (tests/golden/universal/make.py),
// and what is wrong with others.
#include "engine/checkpoint/universal_source.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include <fmt/format.h>

#include <sluice/checkpoint.h>
#include <sluice/error.h>
#include "tests/support/expect_error.h"
#include "tests/support/file_text.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

using namespace std::string_literals;

const std::string kFolder = std::string(SLUICE_GOLDEN_DIR) + "/universal";
const TensorPlace kTensor{.name = "a.weight", .element_count = 15};

StateDescription wanted() {
  return {.tensors = {{.name = "a.weight", .shape = {3, 5}}}};
}

float expected(StateKind kind, std::uint64_t i) {
  const auto number = static_cast<float>(i);
  if (kind == StateKind::kExpAvg) return number * 0.5f;
  return kind == StateKind::kExpAvgSq ? number * number : number / 8 - 1;
}

void expect_words(const std::string& words, const auto& body) {
  const std::string said = expect_error(ErrorCode::kInput, body);
  EXPECT_NE(said.find(words), std::string::npos) << said;
}

TEST(UniversalSource, EveryRangeOfMastersAndMomentsArrives) {
  const OpenCheckpoint opened = open_checkpoint(kFolder);
  EXPECT_EQ(opened.source->position().step, 7u);
  EXPECT_TRUE(opened.application.empty());
  opened.source->prepare(wanted());
  for (const StateKind kind : {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
    for (std::uint64_t first = 0; first < 15; ++first) {
      for (std::uint64_t count = 1; first + count <= 15; ++count) {
        std::vector<float> values(count);
        opened.source->read(kTensor, kind, first, values);
        for (std::uint64_t i = 0; i < count; ++i)
          ASSERT_EQ(values[i], expected(kind, first + i)) << first << " " << count;
      }
    }
  }
  std::vector<float> more(3);
  expect_words("reach beyond", [&] { opened.source->read(kTensor, StateKind::kMaster, 13, more); });
}

TEST(UniversalSource, TheFolderOfTheTagIsFound) {
  const TempDirectory directory;
  std::filesystem::create_directory(directory.path() + "/step7_universal");
  std::filesystem::copy(kFolder + "/zero", directory.path() + "/step7_universal/zero",
                        std::filesystem::copy_options::recursive);
  EXPECT_FALSE(universal_parameters(directory.path()));
  std::ofstream(directory.path() + "/latest_universal") << "step7_universal";
  EXPECT_EQ(universal_parameters(directory.path()), directory.path() + "/step7_universal/zero");
  EXPECT_EQ(open_checkpoint(directory.path()).source->position().step, 7u);
}

TEST(UniversalSource, ATagThatIsNoFileOrHasNoEndIsNamed) {
  const TempDirectory directory;
  const std::string tag = directory.path() + "/latest_universal";
  ASSERT_EQ(::mkfifo(tag.c_str(), 0600), 0);
  expect_words("latest_universal\" is no regular file",
               [&] { (void)universal_parameters(directory.path()); });
  std::filesystem::remove(tag);
  std::filesystem::create_symlink("/dev/zero", tag);
  expect_words("latest_universal\" is no regular file",
               [&] { (void)universal_parameters(directory.path()); });
  std::filesystem::remove(tag);
  std::ofstream(tag).close();
  std::filesystem::resize_file(tag, 1 << 20);
  expect_words("latest_universal\" cannot be read: it has more than",
               [&] { (void)universal_parameters(directory.path()); });
}

TEST(UniversalSource, TwoFoldersOfOneParameterAreNamed) {
  const TempDirectory directory;
  const std::string zero = directory.path() + "/zero";
  std::filesystem::copy(kFolder + "/zero", zero, std::filesystem::copy_options::recursive);
  std::filesystem::copy(zero + "/module.a.weight", zero + "/a.weight");
  for (const std::string name : {"/module.a.weight\"", "/a.weight\""})
    expect_words(name, [&] { (void)open_checkpoint(directory.path()); });
}

TEST(UniversalSource, AnOpaqueTensorIsNamed) {
  UniversalSource source(kFolder + "/zero");
  StateDescription opaque = wanted();
  opaque.tensors[0].is_frozen = opaque.tensors[0].is_opaque = true;
  expect_words("the bits of \"a.weight\", which is opaque", [&] { source.prepare(opaque); });
}

TEST(UniversalSource, AnotherModelOrOptimizerIsNamed) {
  UniversalSource source(kFolder + "/zero");
  StateDescription other = wanted();
  other.tensors[0].shape = {5, 3};
  expect_words("has the shape [3, 5], but the model [5, 3]", [&] { source.prepare(other); });
  other = wanted();
  other.tensors.push_back({.name = "b", .shape = {1}});
  expect_words("has no parameter \"b\"", [&] { source.prepare(other); });
  other.tensors.clear();
  expect_words("no tensor for \"" + kFolder, [&] { source.prepare(other); });
  other = wanted();
  other.optimizer = OptimizerKind::kLion;
  expect_words("moments of Adam, but the config asks for lion", [&] { source.prepare(other); });
}

// Before anything of the state changes. A frozen tensor has no moments.
TEST(UniversalSource, MomentsOfAnotherShapeAreNamed) {
  const TempDirectory directory;
  const std::string zero = directory.path() + "/zero";
  std::filesystem::copy(kFolder + "/zero", zero, std::filesystem::copy_options::recursive);
  const std::string folder = zero + "/module.a.weight/";
  for (const std::string name : {"exp_avg.pt", "exp_avg_sq.pt"}) {
    std::filesystem::rename(folder + name, folder + "aside");
    std::filesystem::copy(kFolder + "/other_shape.pt", folder + name);
    UniversalSource source(zero);
    expect_words(name + "\" has the shape [5, 3], but the model [3, 5]",
                 [&] { source.prepare(wanted()); });
    StateDescription frozen = wanted();
    frozen.tensors[0].is_frozen = true;
    EXPECT_NO_THROW(source.prepare(frozen));
    std::filesystem::rename(folder + "aside", folder + name);
  }
}

TEST(UniversalSource, ParametersAtDifferentStepsAreRefused) {
  const TempDirectory directory;
  const std::string zero = directory.path() + "/zero";
  std::filesystem::copy(kFolder + "/zero", zero, std::filesystem::copy_options::recursive);
  std::filesystem::copy(zero + "/module.a.weight", zero + "/b");
  std::filesystem::copy(kFolder + "/other_step.pt", zero + "/b/step.pt",
                        std::filesystem::copy_options::overwrite_existing);
  // By name: "a.weight" comes first.
  expect_words("/b/step.pt\" is at step 8, but \"a.weight\" at step 7",
               [&] { (void)open_checkpoint(directory.path()); });
  std::filesystem::copy(zero + "/b/exp_avg.pt", zero + "/b/step.pt",
                        std::filesystem::copy_options::overwrite_existing);
  expect_words("it holds no count", [&] { (void)open_checkpoint(directory.path()); });
  std::filesystem::remove(zero + "/b/step.pt");
  EXPECT_EQ(open_checkpoint(directory.path()).source->position().step, 7u);
}

// Some optimizers count their steps elsewhere. At step 0, the bias correction would be wrong.
TEST(UniversalSource, WithoutAStepItIsRefused) {
  const TempDirectory directory;
  const std::string zero = directory.path() + "/zero";
  std::filesystem::copy(kFolder + "/zero", zero, std::filesystem::copy_options::recursive);
  std::filesystem::remove(zero + "/module.a.weight/step.pt");
  expect_words("does not say how many updates its moments have seen",
               [&] { (void)open_checkpoint(directory.path()); });
}

// Whatever has happened to a file: it is refused, or every value is what it was.
TEST(UniversalSource, NoFlippedBitAndNoCutChangesAValue) {
  const TempDirectory directory;
  const std::string path = directory.path() + "/file.pt";
  const std::string whole = file_text(kFolder + "/zero/module.a.weight/fp32.pt");
  std::size_t refused = 0;
  const auto look = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
    std::vector<float> values(15);
    try {
      TorchFile file(path, "param");
      if (!file.has_tensor()) throw Error(ErrorCode::kInput, "no tensor");
      file.read(0, values);
    } catch (const Error& error) {
      ++refused;
      EXPECT_TRUE(error.code() == ErrorCode::kInput || error.code() == ErrorCode::kDamaged);
      return;
    }
    for (std::uint64_t i = 0; i < values.size(); ++i)
      EXPECT_EQ(values[i], expected(StateKind::kMaster, i));
  };
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << (at % 8)));
    look(bytes);
  }
  EXPECT_GT(refused, 200u);
  for (std::size_t length = 0; length < whole.size(); length += 7) look(whole.substr(0, length));
}

TEST(PickleReader, OpcodesAndNamesOutsideOfTheSetAreNamedAndNotExecuted) {
  const auto refused = [](const std::string& bytes, const std::string& words) {
    const std::string said =
        expect_error(ErrorCode::kInput, [&] { (void)read_pickle(bytes, "f.pt"); });
    EXPECT_NE(said.find("\"f.pt\""), std::string::npos) << said;
    EXPECT_NE(said.find(words), std::string::npos) << said;
    EXPECT_NE(said.find("write the file again, such as with DeepSpeed's ds_to_universal"),
              std::string::npos)
        << said;
  };
  refused(
      "\x80\x02"
      "cos\nsystem\n(X\x02\0\0\0lstR."s,
      "byte 2: the name \"os.system\"");
  refused(
      "\x80\x02"
      "cbuiltins\neval\n.",
      "\"builtins.eval\"");
  refused("(S'x'\nios\nsystem\n.", "byte 1: opcode 0x53");
  refused("\x80\x04\x8c\x02os\x8c\x06system\x93.", "opcode 0x93");
  refused("}b.", "opcode 0x62");
  refused("N", "ends in the middle");
  refused(".", "a value is missing");
  refused("t", "a mark is missing");
  refused("h\x07", "no memo 7");
  refused("NQ.", "expected a storage");
  refused("ccollections\nOrderedDict\nN\x85R.", "a call of \"collections.OrderedDict\"");
  refused(
      "X\xff\xff\xff\x7f"
      "a",
      "ends in the middle");
  refused(std::string(70'000, 'N'), "more values");
  EXPECT_TRUE(std::holds_alternative<PickleDictionary>(read_pickle("}.", "f.pt")->value));
}

// The end of such a value must not call itself for each level.
TEST(PickleReader, MillionsOfLevelsAndValuesInThemselvesEnd) {
  const std::string deep = "N" + std::string(4'000'000, '\x85') + ".";
  EXPECT_TRUE(std::holds_alternative<PickleSequence>(read_pickle(deep, "f.pt")->value));
  const PickleObject own = read_pickle("}q\x01Nh\x01s."s, "f.pt");
  EXPECT_EQ(std::get<PickleDictionary>(own->value).items[0].second, own);
}

// A few bytes may copy a long key or shape again and again.
TEST(PickleReader, CopiesOfKeysAndShapesHaveALimit) {
  const auto repeated = [](const std::string& part, std::size_t count) {
    std::string all;
    for (std::size_t i = 0; i < count; ++i) all += part;
    return all;
  };
  const auto refused = [](const std::string& bytes) {
    expect_words("B of keys and shapes", [&] { (void)read_pickle(bytes, "f.pt"); });
  };
  const std::string storage_type = "ctorch\nFloatStorage\n";
  const std::string long_key =
      "(X\x07\0\0\0storage"s + storage_type + "X\0\0\x10\0"s + std::string(1 << 20, 'k') + "NK\1t";
  refused(long_key + "q\1" + repeated("h\1Q", 200) + ".");
  // A tensor of 60,000 extents.
  const std::string tensor = "(X\x07\0\0\0storage"s + storage_type + "X\1\0\0\0kNK\1tQq\1("s +
                             repeated("K\1", 60'000) + "tq\2" +
                             "ctorch._utils\n_rebuild_tensor_v2\nq\3(h\1K\0h\2h\2tq\4"s;
  EXPECT_EQ(std::get<PickleTensor>(read_pickle(tensor + "h\3h\4R.", "f.pt")->value).shape.size(),
            60'000u);
  refused(tensor + repeated("h\3h\4R", 200) + ".");
  refused(tensor + "h\3h\4R\x85q\5" + "ctorch._utils\n_rebuild_parameter\nq\6" +
          repeated("h\6h\5R", 200) + ".");
}

}  // namespace
}  // namespace sluice::test
