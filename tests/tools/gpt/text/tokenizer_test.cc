#include "tools/gpt/text/tokenizer.h"
#include "tests/support/file_text.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <string>
#include <vector>

#include "base/utf8.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tools/gpt/text/gpt2_words.h"
#include "tools/gpt/text/token_file.h"

namespace sluice {
namespace {

using test::expect_error;
using Tokens = std::vector<TokenId>;
using Words = std::vector<std::string>;

Words words_of(std::string_view text) {
  Words words;
  while (!text.empty()) {
    const std::size_t size = gpt2_word_bytes(text);
    words.emplace_back(text.substr(0, size));
    text.remove_prefix(size);
  }
  return words;
}

TEST(Gpt2WordsTest, SplitsAsThePatternSays) {
  EXPECT_EQ(words_of("it's  2nd"), (Words{"it", "'s", " ", " 2", "nd"}));
  EXPECT_EQ(words_of("we'll've'LL"), (Words{"we", "'ll", "'ve", "'", "LL"}));
  EXPECT_EQ(words_of("a\n\n\tb \n"), (Words{"a", "\n\n", "\t", "b", " \n"}));
  EXPECT_EQ(words_of("x...!  "), (Words{"x", "...!", "  "}));
  EXPECT_EQ(words_of(" 's !'s"), (Words{" '", "s", " !'", "s"}));
}

TEST(Gpt2WordsTest, KnowsTheClassesOfUnicode) {
  EXPECT_EQ(words_of("h\u00e9llo\u4e2d \u0661\u2460\u2167"),
            (Words{"h\u00e9llo\u4e2d", " \u0661\u2460\u2167"}));
  EXPECT_EQ(words_of("a\u00a0b\u3000 c"), (Words{"a", "\u00a0", "b", "\u3000", " c"}));
  // U+200B and the separators from U+001C on are no White_Space.
  EXPECT_EQ(words_of("a\u200b\x1c"), (Words{"a", "\u200b\x1c"}));
  EXPECT_EQ(words_of("\U00010330\U0001F600"), (Words{"\U00010330", "\U0001F600"}));
}

TEST(Gpt2WordsTest, KeepsBytesThatAreNotUtf8) {
  // A byte of continuation, an overlong form, a surrogate, a cut sequence.
  for (const std::string bytes : {"\x80", "\xc0\xaf", "\xed\xa0\x80", "\xf5\x80", "\xe4\xb8"}) {
    EXPECT_EQ(words_of("a" + bytes + "b"), (Words{"a", bytes, "b"}));
    EXPECT_EQ(words_of("a" + bytes), (Words{"a", bytes}));
  }
}

TEST(Gpt2WordsTest, CutsWherePartsHaveTheWordsOfTheWhole) {
  const std::string text = "ab  c'd \n\n\u4e2d\u3000 e \u3000f\xe3\x80 g";
  std::size_t cuts = 0;
  for (std::size_t limit = 1; limit < text.size(); ++limit) {
    const std::size_t cut = gpt2_cut_bytes(text, limit);
    ASSERT_LE(cut, limit);
    if (cut == 0) continue;
    ++cuts;
    Words parts = words_of(text.substr(0, cut));
    for (const std::string& word : words_of(text.substr(cut))) parts.push_back(word);
    EXPECT_EQ(parts, words_of(text)) << cut;
  }
  EXPECT_GT(cuts, 10u);
  EXPECT_EQ(gpt2_cut_bytes("\u3000 ab", 4), 0u);
  EXPECT_EQ(gpt2_cut_bytes(" abc", 3), 0u);
  EXPECT_EQ(gpt2_cut_bytes("ab cd ef", 7, 4), 5u);
  EXPECT_EQ(gpt2_cut_bytes("ab cd ef", 7, 5), 0u);
}

TEST(Utf8Test, ReplacesWhatIsNoCharacter) {
  EXPECT_EQ(valid_utf8("a\u00e9\u4e2d\U0001F600"), "a\u00e9\u4e2d\U0001F600");
  EXPECT_EQ(valid_utf8("\x80z\xe4\xb8"), "\ufffdz\ufffd\ufffd");
  // A surrogate, an overlong form, a number beyond U+10FFFF.
  EXPECT_EQ(valid_utf8("\xed\xa0\x80"), "\ufffd\ufffd\ufffd");
  EXPECT_EQ(valid_utf8("\xe0\x80\xaf"), "\ufffd\ufffd\ufffd");
  EXPECT_EQ(valid_utf8("\xf4\x90\x80\x80"), "\ufffd\ufffd\ufffd\ufffd");
}

// Bytes are tokens 0 to 255, by their place in the alphabet of the files.
std::string vocabulary_text(const std::string& more) {
  std::string text = "{";
  std::uint32_t next = 0x100, id = 0;
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    const bool is_printed = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    text += fmt::format("\"\\u{:04x}\": {}, ", is_printed ? byte : next++, id++);
  }
  return text + more + "}";
}

class TokenizerTest : public testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(folder_.file(name), std::ios::binary) << text;
    return folder_.file(name);
  }

  // `parts` are more members of tokenizer.json.
  std::string write_json(
      const std::string& parts = "",
      const std::string& merges = R"(["l l", ["h", "e"], ["he", "ll"], "\u0120 w", "e l"])") {
    return write("tokenizer.json",
                 fmt::format(R"({{"model": {{"type": "BPE", "merges": {}, "vocab": {}}},
                                  "pre_tokenizer": {{"type": "ByteLevel"}}{}}})",
                             merges, vocabulary_text(kMore), parts));
  }

  Tokens encoded(const std::string& path, std::string_view text) {
    Tokens tokens;
    Tokenizer(path).encode(text, tokens);
    return tokens;
  }

  std::string refusal(const std::string& path) {
    return expect_error(ErrorCode::kInput, [&] { const Tokenizer tokenizer(path); });
  }

  static constexpr const char* kMore =
      "\"ll\": 256, \"he\": 257, \"hell\": 258, \"\\u0120w\": 259, \"el\": 260";
  test::TempDirectory folder_;
};

TEST_F(TokenizerTest, MergesByRank) {
  const std::string path = write_json();
  EXPECT_EQ(encoded(path, "hello w"), (Tokens{258, 'o', 259}));
  EXPECT_EQ(encoded(path, "lll"), (Tokens{256, 'l'}));
  EXPECT_EQ(encoded(path, "hel l"), (Tokens{257, 'l', ' ', 'l'}));
  EXPECT_EQ(encoded(path, "hel"), (Tokens{257, 'l'}));  // "el" would come later
  EXPECT_EQ(encoded(path, "el"), (Tokens{260}));
  EXPECT_EQ(Tokenizer(path).token_count(), 261u);
}

TEST_F(TokenizerTest, ReadsVocabularyAndMerges) {
  write("vocab.json", vocabulary_text(kMore));
  write("merges.txt", "#version: 0.2\nl l\nh e\nhe ll\n\u0120 w\n");
  for (const std::string& path : {folder_.file("vocab.json"), folder_.path()})
    EXPECT_EQ(encoded(path, "hello w"), (Tokens{258, 'o', 259}));
}

TEST_F(TokenizerTest, DecodesEveryText) {
  Tokenizer tokenizer(write_json());
  std::string text = "hello \xff\xc0 w\u4e2d";
  for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
  Tokens tokens;
  tokenizer.encode(text, tokens);
  std::string decoded;
  for (const TokenId token : tokens) decoded += tokenizer.bytes_of(token);
  EXPECT_EQ(decoded, text);
  EXPECT_EQ(tokenizer.bytes_of(261), "");
}

TEST_F(TokenizerTest, FindsAddedTokensFirst) {
  const std::string path =
      write_json(R"(, "added_tokens": [{"id": 300, "content": "<e>", "special": true},
                                       {"id": 301, "content": "<e><e>", "special": true},
                                       {"id": 302, "content": "ll", "normalized": true}])");
  EXPECT_EQ(encoded(path, "he<e><e><e>"), (Tokens{257, 301, 300}));
  EXPECT_EQ(encoded(path, "hell<e"), (Tokens{257, 302, '<', 'e'}));
  EXPECT_EQ(Tokenizer(path).token_count(), 303u);
  EXPECT_EQ(Tokenizer(path).bytes_of(301), "<e><e>");
}

TEST_F(TokenizerTest, PutsASpaceBeforeATextOnce) {
  const std::string path = write("tokenizer.json", [&] {
    return fmt::format(R"({{"model": {{"type": "BPE", "merges": ["\u0120 w"], "vocab": {}}},
                            "pre_tokenizer": {{"type": "ByteLevel", "add_prefix_space": true}}}})",
                       vocabulary_text(kMore));
  }());
  EXPECT_EQ(encoded(path, "w w"), (Tokens{259, 259}));
  EXPECT_EQ(encoded(path, " w"), (Tokens{259}));
  Tokens later;
  Tokenizer(path).encode("\nw", later, /*offset_bytes=*/5);
  EXPECT_EQ(later, (Tokens{'\n', 'w'}));
}

TEST_F(TokenizerTest, RefusesOtherKindsByName) {
  const auto refused = [&](const std::string& parts) {
    return refusal(write("tokenizer.json", "{" + parts + "}"));
  };
  const std::string model = R"("model": {"type": "BPE", "vocab": {"a": 0}, "merges": []})";
  const std::string bytes = R"(, "pre_tokenizer": {"type": "ByteLevel"})";
  EXPECT_NE(refused(R"("model": {"type": "WordPiece"})").find("model is \"WordPiece\""),
            std::string::npos);
  EXPECT_NE(refused(model + R"(, "pre_tokenizer": {"type": "Metaspace"})")
                .find("pre-tokenizer is \"Metaspace\""),
            std::string::npos);
  EXPECT_NE(refused(model + R"(, "pre_tokenizer": {"type": "ByteLevel", "use_regex": false})")
                .find("use_regex false"),
            std::string::npos);
  EXPECT_NE(
      refused(model + bytes + R"(, "normalizer": {"type": "NFC"})").find("normalizer is \"NFC\""),
      std::string::npos);
  EXPECT_NE(refused(R"("model": {"type": "BPE", "ignore_merges": true})").find("ignore_merges"),
            std::string::npos);
  EXPECT_NE(refused(R"("model": {"type": "BPE", "dropout": 0.1})").find("dropout"),
            std::string::npos);
  EXPECT_NE(refused(R"("model": {"type": "BPE", "end_of_word_suffix": "</w>"})").find("</w>"),
            std::string::npos);
  EXPECT_NE(
      refused(model + bytes + R"(, "added_tokens": [{"id": 1, "content": "<m>", "lstrip": true}])")
          .find("lstrip"),
      std::string::npos);
}

TEST_F(TokenizerTest, IsNotCutWhereASpaceIsAdded) {
  for (const bool adds_space : {false, true}) {
    const std::string path = write(
        "tokenizer.json", fmt::format(R"({{"model": {{"type": "BPE", "merges": [], "vocab": {}}},
                        "pre_tokenizer": {{"type": "ByteLevel", "add_prefix_space": {}}},
                        "added_tokens": [{{"id": 261, "content": "<e>"}}]}})",
                                      vocabulary_text(kMore), adds_space));
    const std::string text = "ab<e>\ncd ef";
    const Tokens whole = encoded(path, text);
    Tokenizer tokenizer(path);
    std::size_t cuts = 0;
    for (std::size_t limit = 1; limit < text.size(); ++limit) {
      const std::size_t cut = gpt2_cut_bytes(text, limit);
      if (cut == 0 || !tokenizer.can_cut(text, cut)) continue;
      Tokens parts;
      tokenizer.encode(text.substr(0, cut), parts);
      tokenizer.encode(text.substr(cut), parts, cut);
      EXPECT_EQ(parts, whole) << cut;
      ++cuts;
    }
    EXPECT_GT(cuts, 0u);
    EXPECT_EQ(tokenizer.can_cut(text, 5), !adds_space);
  }
}

TEST_F(TokenizerTest, RefusesFilesThatAreNone) {
  EXPECT_NE(refusal(write("tokenizer.json", "")).find("it is empty"), std::string::npos);
  EXPECT_NE(refusal("/dev/zero").find("not a regular file"), std::string::npos);
  ASSERT_EQ(::mkfifo(folder_.file("pipe").c_str(), 0600), 0);
  EXPECT_NE(refusal(folder_.file("pipe")).find("not a regular file"), std::string::npos);
  std::filesystem::resize_file(write("tokenizer.json", "{"), (1u << 30) + 1);
  EXPECT_NE(refusal(folder_.file("tokenizer.json")).find("at most 1073741824"), std::string::npos);
}

TEST_F(TokenizerTest, RefusesDeepValues) {
  const std::string deep = std::string(300'000, '[') + std::string(300'000, ']');
  for (const std::string& text :
       {"{\"model\": " + deep + "}", "{\"model\": {\"type\": \"BPE\", \"dropout\": " + deep + "}}",
        "{\"model\": {\"type\": \"BPE\"}, \"normalizer\": " + deep + "}",
        "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": " + deep +
            "}}, \"pre_tokenizer\": {\"type\": \"ByteLevel\"}}"})
    EXPECT_NE(refusal(write("tokenizer.json", text)).find("array"), std::string::npos);
  const std::string message =
      refusal(write_json(", \"added_tokens\": [{\"content\": " + deep + ", \"id\": 3}]"));
  EXPECT_NE(message.find("added token 1 of the list has no content and id, but array and 3"),
            std::string::npos)
      << message;
}

TEST_F(TokenizerTest, RefusesDamagedFiles) {
  EXPECT_NE(refusal(folder_.file("none")).find("no such file"), std::string::npos);
  EXPECT_NE(refusal(folder_.path()).find("neither"), std::string::npos);
  EXPECT_NE(refusal(write("tokenizer.json", "{\"model\": ")).find("not a JSON object"),
            std::string::npos);
  EXPECT_NE(refusal(write_json("", R"(["l x"])")).find("merge 1 needs the token \"lx\""),
            std::string::npos);
  EXPECT_NE(refusal(write_json("", R"(["l l", "abc"])")).find("merge 2 is not a pair"),
            std::string::npos);
  write("merges.txt", "");
  EXPECT_NE(refusal(write("vocab.json", R"({"a": 0, "b": 0})")).find("id 0"), std::string::npos);
  EXPECT_NE(refusal(write("vocab.json", R"({"a": 16777216})")).find("16777216"), std::string::npos);
}

TEST_F(TokenizerTest, NamesTheByteWithoutAToken) {
  const std::string path =
      write("tokenizer.json", R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
                                  "pre_tokenizer": {"type": "ByteLevel"}})");
  EXPECT_EQ(encoded(path, "aa"), (Tokens{0, 0}));
  const std::string message =
      expect_error(ErrorCode::kInput, [&] { (void)encoded(path, "aa a!"); });
  EXPECT_NE(message.find("byte 0x20 in the word at byte 2"), std::string::npos) << message;
}

std::vector<std::uint32_t> words_in(const std::string& path) {
  const std::string bytes = test::file_text(path);
  std::vector<std::uint32_t> words(bytes.size() / 4);
  bytes.copy(reinterpret_cast<char*>(words.data()), 4 * words.size());
  return words;
}

ino_t number_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0);
  return status.st_ino;
}

TEST_F(TokenizerTest, MakesATokenFileOnce) {
  Tokenizer tokenizer(write_json());
  const std::string text = write("text", "hello w");
  const std::string path = token_file_beside(text, tokenizer, /*is_quiet=*/true);
  EXPECT_TRUE(has_token_header(path));
  const auto words = words_in(path);
  EXPECT_EQ((std::vector<std::uint32_t>(words.begin(), words.begin() + 3)),
            (std::vector<std::uint32_t>{20240520, 1, 3}));
  EXPECT_EQ(words[256], 258u | 'o' << 16);
  const std::ifstream held(path);  // so that no other file gets its number
  const ino_t made = number_of(path);
  EXPECT_EQ(token_file_beside(text, tokenizer, true), path);
  EXPECT_EQ(number_of(path), made);
  write("text", "hello");  // another text: another file in its place
  EXPECT_EQ(token_file_beside(text, tokenizer, true), path);
  EXPECT_EQ(words_in(path)[2], 2u);
  write(std::filesystem::path(path).filename(), std::string(2000, 'x'));
  EXPECT_NE(expect_error(ErrorCode::kInput, [&] { (void)token_file_beside(text, tokenizer, true); })
                .find("another origin"),
            std::string::npos);
}

}  // namespace
}  // namespace sluice
