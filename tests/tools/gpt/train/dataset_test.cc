#include "tools/gpt/train/dataset.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <tuple>

#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"

namespace sluice {
namespace {

using test::expect_error;

using Words = std::vector<std::uint16_t>;

class DatasetTest : public testing::Test {
 protected:
  DatasetTest() {
    config_.data_file = folder_.file("data");
    config_.model.context = 4;
    config_.sequences = 3;
    config_.micro_batches = 2;
  }

  void write_bytes(const std::string& bytes) { std::ofstream(config_.data_file) << bytes; }

  // Little-endian, behind llm.c's header when `header` has its three words.
  void write_words(const Words& words, const std::vector<std::uint32_t>& header = {}) {
    std::string bytes(header.empty() ? 0 : 1024, '\0');
    for (std::size_t i = 0; i < 4 * header.size(); ++i)
      bytes[i] = static_cast<char>(header[i / 4] >> (i % 4 * 8));
    for (const std::uint16_t word : words) {
      bytes += static_cast<char>(word);
      bytes += static_cast<char>(word >> 8);
    }
    write_bytes(bytes);
  }

  // Token i is i, so that a batch shows where it comes from.
  void write_counting(std::uint16_t count) {
    Words words;
    for (std::uint16_t i = 0; i < count; ++i) words.push_back(i);
    config_.model.vocabulary = count;
    config_.data_format = TokenFormat::kUint16;
    write_words(words);
  }

  std::string expect_refused() {
    return expect_error(ErrorCode::kInput, [this] { const Dataset dataset(config_); });
  }

  test::TempDirectory folder_;
  TrainConfig config_;
};

TEST_F(DatasetTest, ReadsBytes) {
  write_bytes(std::string(100, '\xff') + "abc");
  const Dataset dataset(config_);
  EXPECT_EQ(dataset.token_count(), 103u);
  EXPECT_EQ(dataset.validation_tokens(), 5u);  // 5 % of 103, and one sequence with its successor
  EXPECT_EQ(dataset.training_batch(0, 0).tokens, std::vector<std::uint32_t>(12, 255));
  const TokenBatch last = dataset.validation_batches(1).front();
  EXPECT_EQ(last.targets[3], static_cast<std::uint32_t>('c'));
}

TEST_F(DatasetTest, ReadsWordsWithAndWithoutHeader) {
  const Words words{1, 300, 65535, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  config_.model.vocabulary = 65536;
  config_.validation_fraction = 0.5;
  for (const bool has_header : {false, true}) {
    for (const TokenFormat format : {TokenFormat::kUint16, TokenFormat::kAuto}) {
      if (format == TokenFormat::kAuto && !has_header) continue;  // then it is a text
      config_.data_format = format;
      write_words(words, has_header ? std::vector<std::uint32_t>{20240520, 1, 12}
                                    : std::vector<std::uint32_t>{});
      const Dataset dataset(config_);
      EXPECT_EQ(dataset.token_count(), 12u);
      EXPECT_EQ(dataset.training_tokens(), 6u);
      EXPECT_EQ(dataset.validation_batches(1)[0].tokens, (std::vector<std::uint32_t>{7, 8, 9, 10}));
      std::set<std::uint32_t> seen;
      for (std::uint64_t step = 0; step < 20; ++step) {
        const TokenBatch batch = dataset.training_batch(step, 0);
        seen.insert(batch.tokens.begin(), batch.tokens.end());
      }
      EXPECT_EQ(seen, (std::set<std::uint32_t>{1, 300, 65535, 4, 5}));
    }
  }
}

TEST_F(DatasetTest, ReadsTokensOf32Bits) {
  // Each token as two words: the low one, then the high one.
  const Words words{0, 0, 5, 1, 6, 0, 1, 0, 2, 0, 5, 0, 6, 0, 7, 0, 8, 0, 9, 2};
  config_.model.vocabulary = 0x20010;
  config_.validation_fraction = 0.5;
  for (const bool has_header : {false, true}) {
    config_.data_format = has_header ? TokenFormat::kAuto : TokenFormat::kUint32;
    write_words(words, has_header ? std::vector<std::uint32_t>{20240801, 7, 10}
                                  : std::vector<std::uint32_t>{});
    const Dataset dataset(config_);
    EXPECT_EQ(dataset.token_count(), 10u);
    EXPECT_EQ(dataset.training_batch(0, 0).tokens[1], 0x10005u);
    const auto batches = dataset.validation_batches(1);
    EXPECT_EQ(batches[0].tokens[0], 5u);
    EXPECT_EQ(batches[0].targets[3], 0x20009u);
    // 0x10005 and 6 follow each other in the training part, 5 and 6 in the validation part: not the
    // same pair. 6 has been seen there once as the first of a pair.
    const double unseen = std::log(0x20010 + 0.0), once = std::log(0x20010 + 1.0);
    EXPECT_NEAR(dataset.bigram_cross_entropy(batches), (3 * unseen + once) / 4, 1e-9);
  }
  config_.data_format = TokenFormat::kUint16;
  EXPECT_NE(expect_refused().find("header says uint32"), std::string::npos);
}

TEST_F(DatasetTest, TellsTheFormatByTheHeader) {
  write_words(Words(20, 7), {20240520, 1, 20});
  EXPECT_EQ(Dataset(config_).token_count(), 20u);
  config_.data_format = TokenFormat::kBytes;  // the user knows better
  EXPECT_EQ(Dataset(config_).token_count(), 1024u + 40);
  config_.data_format = TokenFormat::kAuto;
  write_words(Words(20, 7), {20240521, 1, 20});
  EXPECT_EQ(Dataset(config_).token_count(), 1024u + 40);
}

TEST_F(DatasetTest, RefusesDamagedHeaders) {
  config_.model.vocabulary = 65536;
  write_words(Words(20, 7), {20240520, 2, 20});
  EXPECT_NE(expect_refused().find("version 2"), std::string::npos);
  write_words(Words(20, 7), {20240520, 1, 21});
  EXPECT_NE(expect_refused().find("promises 21 tokens, but 20"), std::string::npos);
  write_words({}, {20240520, 1, 0});
  (void)expect_refused();
  config_.data_format = TokenFormat::kUint16;
  write_bytes(std::string(1001, 'a'));
  EXPECT_NE(expect_refused().find("whole number"), std::string::npos);
}

TEST_F(DatasetTest, RefusesTokensBeyondTheVocabulary) {
  config_.model.vocabulary = 98;
  write_bytes(std::string(50, 'a') + "b");
  EXPECT_NE(expect_refused().find("token 50 is 98, but model.vocabulary is 98; raise it to at "
                                  "least 99"),
            std::string::npos);
  config_.data_format = TokenFormat::kUint32;
  write_bytes(std::string(400, '\xff'));
  EXPECT_NE(expect_refused().find("another data.format"), std::string::npos);
  config_.data_format = TokenFormat::kBytes;
  write_bytes(std::string(50, 'a') + "b");
  config_.model.vocabulary = 99;
  (void)Dataset(config_);
  config_.text_file = "text";  // which the tokens were made from
  config_.model.vocabulary = 98;
  EXPECT_NE(expect_refused().find("the file is damaged; remove it, and it is made again from "
                                  "\"text\""),
            std::string::npos);
  config_.text_file.clear();
  config_.model.vocabulary = 99;
  // Behind the first piece, too.
  write_bytes(std::string((1 << 20) + 3, 'a') + "z");
  EXPECT_NE(expect_refused().find("token 1048579 is 122"), std::string::npos);
}

TEST_F(DatasetTest, RefusesWhatIsNoText) {
  EXPECT_NE(expect_refused().find("No such file"), std::string::npos);
  write_bytes("");
  EXPECT_NE(expect_refused().find("empty"), std::string::npos);
  write_bytes("123456789");
  EXPECT_NE(expect_refused().find("9 tokens"), std::string::npos);
  write_bytes("1234567890");
  EXPECT_EQ(Dataset(config_).training_tokens(), 5u);
  config_.data_file = folder_.path();
  EXPECT_NE(expect_refused().find("not a regular file"), std::string::npos);
  config_.data_file = folder_.file("pipe");
  ASSERT_EQ(::mkfifo(config_.data_file.c_str(), 0600), 0);
  EXPECT_NE(expect_refused().find("not a regular file"), std::string::npos);
  config_.data_file.clear();
  (void)expect_error(ErrorCode::kConfig, [this] { const Dataset dataset(config_); });
}

TEST_F(DatasetTest, NoticesAFileCutMeanwhile) {
  write_counting(200);
  const Dataset dataset(config_);
  std::filesystem::resize_file(config_.data_file, 2);
  (void)expect_error(ErrorCode::kInput, [&] { (void)dataset.training_batch(0, 0); });
}

TEST_F(DatasetTest, NeverTrainsOnTheValidationPart) {
  config_.validation_fraction = 0.1;
  write_counting(200);
  const Dataset dataset(config_);
  EXPECT_EQ(dataset.training_tokens(), 180u);
  std::set<std::uint32_t> trained;
  for (std::uint64_t step = 0; step < 500; ++step) {
    for (std::uint32_t micro_batch = 0; micro_batch < 2; ++micro_batch) {
      const TokenBatch batch = dataset.training_batch(step, micro_batch);
      ASSERT_EQ(batch.tokens.size(), 12u);
      for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
        ASSERT_EQ(batch.targets[i], batch.tokens[i] + 1);
        if (i % 4 != 0) {
          ASSERT_EQ(batch.tokens[i], batch.tokens[i - 1] + 1);
        }
        trained.insert(batch.targets[i]);
      }
    }
  }
  EXPECT_EQ(*trained.begin(), 1u);
  EXPECT_EQ(*trained.rbegin(), 179u);  // all of the part, nothing beyond it
  EXPECT_EQ(trained.size(), 179u);
  for (const TokenBatch& batch : dataset.validation_batches(32)) {
    EXPECT_EQ(batch.tokens.size(), batch.targets.size());
    for (const std::uint32_t token : batch.tokens) EXPECT_GE(token, 180u);
    for (const std::uint32_t target : batch.targets) EXPECT_LT(target, 200u);
  }
}

// Counts of pairs are made at the end of a run, of a file that another program may have written to.
TEST_F(DatasetTest, TokensThatBecameTooLargeAreRefused) {
  write_counting(200);
  const Dataset dataset(config_);
  const std::vector<TokenBatch> batches = dataset.validation_batches(2);
  const auto never = [] { return false; };
  EXPECT_TRUE(dataset.bigram_cross_entropy_until(never, batches));
  std::fstream file(config_.data_file, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(2 * 17);
  file.write("\xff\xff", 2);
  file.close();
  const std::string message = expect_error(
      ErrorCode::kInput, [&] { (void)dataset.bigram_cross_entropy_until(never, batches); });
  EXPECT_NE(message.find("token 17 is 65535, but model.vocabulary is 200, and it was less at the "
                         "start; the file was changed meanwhile"),
            std::string::npos)
      << message;
}

TEST_F(DatasetTest, BatchesFollowFromSeedStepAndMicroBatch) {
  write_counting(2000);
  config_.seed = 3;
  const Dataset first(config_);
  const Dataset second(config_);
  const TokenBatch wanted = first.training_batch(7, 1);
  (void)second.training_batch(1, 0);
  (void)second.validation_batches(4);
  EXPECT_EQ(second.training_batch(7, 1).tokens, wanted.tokens);
  EXPECT_NE(second.training_batch(7, 0).tokens, wanted.tokens);
  EXPECT_NE(second.training_batch(8, 1).tokens, wanted.tokens);
  config_.seed = 4;
  EXPECT_NE(Dataset(config_).training_batch(7, 1).tokens, wanted.tokens);
}

// After other batches, the sequences go on behind those that were drawn.
TEST_F(DatasetTest, GoesOnBehindTheSequencesOfOtherBatches) {
  write_counting(2002);
  config_.sequences = 4;
  const Dataset before(config_);
  config_.sequences = 2;
  Dataset after(config_, /*rank_count=*/2);
  after.go_on(10, 80);
  std::vector<std::uint32_t> expected = before.training_batch(10, 0).tokens;
  std::vector<std::uint32_t> actual;
  for (const std::uint32_t micro_batch : {0u, 1u}) {
    const std::vector<std::uint32_t> tokens = after.training_batch(10, micro_batch).tokens;
    actual.insert(actual.end(), tokens.begin(), tokens.end());
  }
  EXPECT_EQ(actual, expected);
  EXPECT_EQ(after.training_batch(11, 0).tokens, [&] {
    expected = before.training_batch(11, 0).tokens;
    expected.resize(expected.size() / 2);
    return expected;
  }());
}

TEST_F(DatasetTest, SpreadsValidationOverThePart) {
  config_.validation_fraction = 0.5;
  write_counting(2002);  // 1,001 validation tokens: 250 sequences of four and a successor
  const Dataset dataset(config_);
  const auto few = dataset.validation_batches(6);
  ASSERT_EQ(few.size(), 2u);
  // Six of 250 sequences: 0, 41, 83, 125, 166 and 208.
  constexpr std::uint32_t kSequences[] = {0, 41, 83, 125, 166, 208};
  for (std::size_t i = 0; i < 6; ++i)
    EXPECT_EQ(few[i / 3].tokens[i % 3 * 4], 1001 + 4 * kSequences[i]);
  const auto all = dataset.validation_batches(1000);
  ASSERT_EQ(all.size(), 84u);  // 250, three in a batch
  EXPECT_EQ(all.front().tokens.size(), 12u);
  EXPECT_EQ(all.back().tokens.size(), 4u);
}

TEST_F(DatasetTest, ValidationHasTheSameSequencesWhateverTheBatch) {
  config_.validation_fraction = 0.1;
  write_counting(220);  // 22 validation tokens: 5 sequences of four and a successor
  const auto all_of = [&](std::uint32_t sequences, std::uint64_t wanted) {
    config_.sequences = sequences;
    const Dataset dataset(config_);
    const auto batches = dataset.validation_batches(wanted);
    TokenBatch all;
    for (const TokenBatch& batch : batches) {
      all.tokens.insert(all.tokens.end(), batch.tokens.begin(), batch.tokens.end());
      all.targets.insert(all.targets.end(), batch.targets.begin(), batch.targets.end());
    }
    return std::tuple(all.tokens, all.targets, dataset.bigram_cross_entropy(batches));
  };
  EXPECT_EQ(std::get<0>(all_of(1, 9)).size(), 5u * 4);
  EXPECT_EQ(std::get<0>(all_of(1, 4)).size(), 4u * 4);
  for (const std::uint32_t sequences : {2u, 3u, 4u, 5u, 7u, 64u}) {
    EXPECT_EQ(all_of(sequences, 9), all_of(1, 9)) << sequences;
    EXPECT_EQ(all_of(sequences, 4), all_of(1, 4)) << sequences;
  }
}

TEST_F(DatasetTest, BigramCrossEntropyByHand) {
  // Training: a b a b a c (12 tokens would be too many to count by hand); validation: a b c a b.
  config_.model.vocabulary = 3;
  config_.model.context = 4;
  config_.sequences = 1;
  config_.data_format = TokenFormat::kUint16;
  config_.validation_fraction = 0.45;  // 5 of 11
  write_words({0, 1, 0, 1, 0, 2, 0, 1, 2, 0, 1});
  const Dataset dataset(config_);
  ASSERT_EQ(dataset.training_tokens(), 6u);
  const auto batches = dataset.validation_batches(1);
  ASSERT_EQ(batches[0].tokens, (std::vector<std::uint32_t>{0, 1, 2, 0}));
  ASSERT_EQ(batches[0].targets, (std::vector<std::uint32_t>{1, 2, 0, 1}));
  // Pairs of the training part: 01, 10, 01, 10, 02. After 0: 1 twice, 2 once. After 1: 0 twice.
  const double after_0_comes_1 = (2.0 + 1) / (3 + 3);
  const double after_1_comes_2 = (0.0 + 1) / (2 + 3);
  const double after_2_comes_0 = 1.0 / 3;  // 2 has no successor there
  const double expected =
      -(2 * std::log(after_0_comes_1) + std::log(after_1_comes_2) + std::log(after_2_comes_0)) / 4;
  EXPECT_NEAR(dataset.bigram_cross_entropy(batches), expected, 1e-12);
}

// It is asked before each of the two pieces, and ends at the first yes.
TEST_F(DatasetTest, ACountOfBigramsEndsWhenItIsAsked) {
  config_.sequences = 1;
  config_.validation_fraction = 1e-4;
  write_bytes(std::string((1 << 20) + 1000, 'a'));
  const Dataset dataset(config_);
  ASSERT_GT(dataset.training_tokens(), (1u << 20) + 1);
  const auto batches = dataset.validation_batches(1);
  int asked = 0;
  const auto yes_at = [&](int number) {
    asked = 0;
    return dataset.bigram_cross_entropy_until([&asked, number] { return ++asked == number; },
                                              batches);
  };
  EXPECT_FALSE(yes_at(1).has_value());
  EXPECT_EQ(asked, 1);
  EXPECT_FALSE(yes_at(2).has_value());
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(yes_at(3), dataset.bigram_cross_entropy(batches));
  EXPECT_EQ(asked, 2);
}

TEST_F(DatasetTest, BigramCountsPairsAcrossPieces) {
  // Only the pair at the border of two pieces of 2^20 tokens is "bc".
  const std::size_t piece = 1 << 20;
  config_.sequences = 1;
  config_.validation_fraction = 1e-9;
  write_bytes(std::string(piece - 1, 'a') + "bc" + std::string(10, 'a') + "bcbcb");
  const Dataset dataset(config_);
  const auto batches = dataset.validation_batches(1);
  ASSERT_EQ(batches[0].tokens, (std::vector<std::uint32_t>{'b', 'c', 'b', 'c'}));
  // b: seen once, followed by c. c: seen once, followed by a.
  const double expected = -(2 * std::log(2.0 / 257) + 2 * std::log(1.0 / 257)) / 4;
  EXPECT_NEAR(dataset.bigram_cross_entropy(batches), expected, 1e-12);
}

}  // namespace
}  // namespace sluice
