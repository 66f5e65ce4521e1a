#include "tools/report/state_hash.h"

#include <gtest/gtest.h>

#include <fstream>

#include <sluice/checkpoint.h>
#include <sluice/units.h>
#include "tests/support/temp_directory.h"
#include "tests/tools/gpt/train/small_gpt.h"
#include "tests/tools/report/sha256_oracle.h"
#include "tools/gpt/train/host_trainer.h"
#include "tools/report/sha256.h"

namespace sluice {
namespace {

using test::sha256_hex;
using test::small_train_config;
using test::SmallGpt;

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

TEST(Sha256, GivesThePublishedDigests) {
  EXPECT_EQ(sha256_hex({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex(bytes_of("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex(bytes_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

std::uint64_t bytes_read_so_far() {
  std::ifstream counters("/proc/self/io");
  std::string name;
  std::uint64_t bytes = 0;
  while (counters >> name >> bytes)
    if (name == "rchar:") return bytes;
  return 0;
}

TEST(Sha256, RangesOfAFileAreReadOnce) {
  const test::TempDirectory folder;
  std::string content(3 << 20, '\0');
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i * i >> 7);
  std::ofstream(folder.file("file"), std::ios::binary) << content;
  const FileRanges file{.path = folder.file("file"),
                        .ranges = {{.size_bytes = content.size()},
                                   {.begin_bytes = 5, .size_bytes = 1},
                                   {.begin_bytes = 4096, .size_bytes = 2 << 20},
                                   {.begin_bytes = 1 << 20, .size_bytes = 1 << 20},
                                   {.begin_bytes = content.size() - 3, .size_bytes = 3}}};
  const std::uint64_t before = bytes_read_so_far();
  const std::vector<std::string> digests = file_sha256(file);
  if (before != 0) {
    EXPECT_LT(bytes_read_so_far() - before, content.size() + 64_KiB);
  }
  ASSERT_EQ(digests.size(), file.ranges.size());
  for (std::size_t i = 0; i < digests.size(); ++i)
    EXPECT_EQ(digests[i], sha256_hex(bytes_of(std::string_view(content).substr(
                              file.ranges[i].begin_bytes, file.ranges[i].size_bytes))));
}

// The definition of docs/cli.md, with the tensors taken from the model and not from the layout.
std::string expected_hash(SmallGpt& gpt) {
  std::vector<std::byte> message;
  for (int i = 0; i < 8; ++i)
    message.push_back(static_cast<std::byte>(gpt.engine().applied_step() >> (8 * i)));
  std::uint32_t tensor = 0;
  for (const UnitSpec& unit : gpt.model().units) {
    for (const TensorSpec& spec : unit.tensors) {
      for (const StateKind kind :
           {StateKind::kParameter, StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
        const auto bytes = gpt.read(TensorId{tensor}, kind);
        const DType dtype =
            kind == StateKind::kParameter ? gpt.config().engine.precision.parameters : DType::kFp32;
        EXPECT_EQ(bytes.size(), spec.element_count() * size_of(dtype));
        message.insert(message.end(), bytes.begin(), bytes.end());
      }
      ++tensor;
    }
  }
  return sha256_hex(std::move(message));
}

TEST(StateHash, IsWhatItsDefinitionSays) {
  const test::TempDirectory folder;
  std::ofstream(folder.file("text")) << std::string(300, 'a') + "bcd";
  for (const DType precision : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    TrainConfig config = small_train_config(folder.path(), precision);
    config.data_file = folder.file("text");
    const Dataset dataset(config);
    SmallGpt gpt(config);
    gpt.engine().initialize(gpt.initial_values());
    const std::string before = state_sha256(gpt.engine());
    EXPECT_EQ(before, expected_hash(gpt));
    HostTrainer trainer(gpt.config(), dataset, gpt.engine(), gpt.device());
    (void)trainer.train_step(0);
    gpt.engine().drain();
    EXPECT_NE(state_sha256(gpt.engine()), before);
    EXPECT_EQ(state_sha256(gpt.engine()), expected_hash(gpt));
  }
}

}  // namespace
}  // namespace sluice
