#include "tools/gpt/text/tokenizer_file.h"

#include <array>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <span>
#include <sstream>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>

namespace sluice {
namespace {

using TokenizerJson = nlohmann::json;

constexpr TokenId kTokensMax = 1 << 24;                 // as model.vocabulary
constexpr std::uintmax_t kTokenizerBytesMax = 1 << 30;  // the largest ones have some 20 MiB
constexpr const char* kTokenizerName = "tokenizer.json";
constexpr const char* kVocabularyName = "vocab.json";
constexpr const char* kMergesName = "merges.txt";

[[noreturn]] void refuse_tokenizer(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kInput, fmt::format("tokenizer \"{}\": {}", path, why));
}

std::string text_of_tokenizer(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    refuse_tokenizer(path, std::filesystem::exists(path, error) ? "it is not a regular file"
                                                                : "there is no such file");
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (!error && size == 0) refuse_tokenizer(path, "it is empty");
  if (!error && size > kTokenizerBytesMax)
    refuse_tokenizer(path, fmt::format("it has {} bytes, but a tokenizer's file has at most {}",
                                       size, kTokenizerBytesMax));
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file || !text) refuse_tokenizer(path, "cannot read it; check the path and its mode");
  return text.str();
}

TokenizerJson parsed(const std::string& path, const std::string& text) {
  TokenizerJson values = TokenizerJson::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!values.is_object()) refuse_tokenizer(path, "it is not a JSON object");
  return values;
}

// A value for a message. dump() recurses, so lists and objects only say what they are.
std::string said(const TokenizerJson& value) {
  return value.is_structured() ? value.type_name() : value.dump();
}

// The character that stands for each byte in these files: itself where it can be printed, otherwise
// one from U+0100 on.
std::array<char32_t, 256> byte_alphabet() {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < alphabet.size(); ++byte) {
    const bool is_printed = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    alphabet[byte] = is_printed ? byte : next++;
  }
  return alphabet;
}

// The bytes that a token's text stands for. A text with other characters stands for itself.
class BytesOfText {
 public:
  BytesOfText() {
    const auto alphabet = byte_alphabet();
    for (std::size_t byte = 0; byte < alphabet.size(); ++byte)
      bytes_[alphabet[byte]] = static_cast<char>(byte);
  }

  std::string operator()(const std::string& text) const {
    std::string bytes;
    for (std::size_t at = 0; at < text.size(); ++at) {
      // JSON's text is UTF-8; the alphabet ends below U+0800, at two bytes.
      char32_t code = static_cast<unsigned char>(text[at]);
      if (code >= 0xC0 && code < 0xE0 && at + 1 < text.size())
        code = (code & 0x1F) << 6 | (static_cast<unsigned char>(text[++at]) & 0x3F);
      const auto found = bytes_.find(code);
      if (found == bytes_.end()) return text;
      bytes += found->second;
    }
    return bytes;
  }

 private:
  std::unordered_map<char32_t, char> bytes_;
};

void read_vocabulary(const TokenizerJson& values, const std::string& part, TokenizerFile& file) {
  if (!values.is_object() || values.empty())
    refuse_tokenizer(file.path, fmt::format("{} is not an object of tokens and their ids", part));
  const BytesOfText bytes_of;
  std::unordered_map<TokenId, std::string> texts;
  for (const auto& [text, id] : values.items()) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() >= kTokensMax)
      refuse_tokenizer(file.path, fmt::format("{} has the id {} for \"{}\"; ids are below {}", part,
                                              said(id), text, kTokensMax));
    const auto [other, is_new] = texts.emplace(id.get<TokenId>(), text);
    if (!is_new)
      refuse_tokenizer(file.path, fmt::format("{} has the id {} for \"{}\" and for \"{}\"", part,
                                              id.dump(), other->second, text));
    file.vocabulary[bytes_of(text)] = id.get<TokenId>();
  }
}

void add_merge(const std::string& left, const std::string& right, const BytesOfText& bytes_of,
               TokenizerFile& file) {
  if (left.empty() || right.empty())
    refuse_tokenizer(file.path,
                     fmt::format("merge {} is not a pair of tokens", file.merges.size() + 1));
  file.merges.emplace_back(bytes_of(left), bytes_of(right));
}

// "a b": the tokens of these files have no space.
void add_merge_line(std::string_view line, const BytesOfText& bytes_of, TokenizerFile& file) {
  const std::size_t space = line.find(' ');
  const bool is_pair =
      space != std::string_view::npos && line.find(' ', space + 1) == std::string_view::npos;
  add_merge(is_pair ? std::string(line.substr(0, space)) : "",
            is_pair ? std::string(line.substr(space + 1)) : "", bytes_of, file);
}

void read_merges(const TokenizerJson& values, TokenizerFile& file) {
  if (!values.is_array()) refuse_tokenizer(file.path, "\"model.merges\" is not a list");
  const BytesOfText bytes_of;
  for (const TokenizerJson& merge : values) {
    if (merge.is_string()) {
      add_merge_line(merge.get<std::string>(), bytes_of, file);
      continue;
    }
    const bool is_pair =
        merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string();
    add_merge(is_pair ? merge[0].get<std::string>() : "",
              is_pair ? merge[1].get<std::string>() : "", bytes_of, file);
  }
}

const TokenizerJson& member_of(const TokenizerJson& values, const char* key) {
  static const TokenizerJson nothing;
  const auto found = values.find(key);
  return found == values.end() ? nothing : *found;
}

std::string type_of(const TokenizerJson& part) {
  const TokenizerJson& type = part.is_object() ? member_of(part, "type") : part;
  return type.is_string() ? type.get<std::string>() : said(type);
}

// Refuses a part that would change the tokens and that this program does not have.
void require_kind(bool is_known, const std::string& part, const std::string& kind,
                  const std::string& path) {
  if (is_known) return;
  refuse_tokenizer(path,
                   fmt::format("its {} is {}; only byte-level BPE as GPT-2 has it is read: model "
                               "\"BPE\", no normalizer, pre-tokenizer \"ByteLevel\"",
                               part, kind));
}

void check_model(const TokenizerJson& model, const std::string& path) {
  require_kind(type_of(model) == "BPE", "model", fmt::format("\"{}\"", type_of(model)), path);
  for (const char* const key : {"continuing_subword_prefix", "end_of_word_suffix", "dropout"}) {
    const TokenizerJson& value = member_of(model, key);
    require_kind(value.is_null() || value == "", fmt::format("model.{}", key), said(value), path);
  }
  for (const char* const key : {"byte_fallback", "ignore_merges"}) {
    const TokenizerJson& value = member_of(model, key);
    require_kind(value.is_null() || value == false, fmt::format("model.{}", key), said(value),
                 path);
  }
}

bool is_empty_sequence(const TokenizerJson& normalizer) {
  return type_of(normalizer) == "Sequence" && member_of(normalizer, "normalizers").empty();
}

void read_added_tokens(const TokenizerJson& values, TokenizerFile& file) {
  if (values.is_null()) return;
  if (!values.is_array()) refuse_tokenizer(file.path, "\"added_tokens\" is not a list");
  for (const TokenizerJson& token : values) {
    const TokenizerJson nothing = TokenizerJson::object();
    const TokenizerJson& fields = token.is_object() ? token : nothing;
    const TokenizerJson& content = member_of(fields, "content");
    const TokenizerJson& id = member_of(fields, "id");
    if (!content.is_string() || content == "" || !id.is_number_unsigned() ||
        id.get<std::uint64_t>() >= kTokensMax)
      refuse_tokenizer(
          file.path, fmt::format("added token {} of the list has no content and id, but {} and {}",
                                 file.added.size() + 1, said(content), said(id)));
    for (const char* const key : {"single_word", "lstrip", "rstrip"})
      require_kind(member_of(fields, key) != true,
                   fmt::format("added token {}'s \"{}\"", content.dump(), key), "true", file.path);
    file.added.push_back({.bytes = content.get<std::string>(),
                          .id = id.get<TokenId>(),
                          .is_normalized = member_of(fields, "normalized") == true});
  }
}

TokenizerFile read_tokenizer_json(const std::string& path) {
  TokenizerFile file;
  file.path = path;
  const std::string text = text_of_tokenizer(path);
  file.checksum = checksum128(std::as_bytes(std::span(text)));
  const TokenizerJson values = parsed(path, text);
  const TokenizerJson& model = member_of(values, "model");
  check_model(model, path);
  const TokenizerJson& normalizer = member_of(values, "normalizer");
  require_kind(normalizer.is_null() || is_empty_sequence(normalizer), "normalizer",
               fmt::format("\"{}\"", type_of(normalizer)), path);
  const TokenizerJson& words = member_of(values, "pre_tokenizer");
  require_kind(type_of(words) == "ByteLevel", "pre-tokenizer",
               fmt::format("\"{}\"", type_of(words)), path);
  require_kind(member_of(words, "use_regex") != false, "pre-tokenizer",
               "\"ByteLevel\" with use_regex false", path);
  file.adds_space = member_of(words, "add_prefix_space") == true;
  read_vocabulary(member_of(model, "vocab"), "\"model.vocab\"", file);
  read_merges(member_of(model, "merges"), file);
  read_added_tokens(member_of(values, "added_tokens"), file);
  return file;
}

TokenizerFile read_vocabulary_and_merges(const std::string& path) {
  TokenizerFile file;
  file.path = path;
  std::string text = text_of_tokenizer(path);
  read_vocabulary(parsed(path, text), "it", file);
  file.path = merges_beside(path);
  const std::string merges = text_of_tokenizer(file.path);
  const BytesOfText bytes_of;
  std::istringstream lines(merges);
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty() || (file.merges.empty() && line.starts_with("#version"))) continue;
    add_merge_line(line, bytes_of, file);
  }
  file.path = path;
  text += merges;
  file.checksum = checksum128(std::as_bytes(std::span(text)));
  return file;
}

}  // namespace

std::string tokenizer_in_folder(const std::string& folder) {
  std::error_code error;
  for (const char* const name : {kTokenizerName, kVocabularyName}) {
    const std::filesystem::path path = std::filesystem::path(folder) / name;
    if (std::filesystem::exists(path, error)) return path.string();
  }
  return {};
}

std::string merges_beside(const std::string& path) {
  const std::filesystem::path file(path);
  if (file.filename() != kVocabularyName) return {};
  return (file.parent_path() / kMergesName).string();
}

TokenizerFile read_tokenizer(const std::string& path) {
  std::error_code error;
  std::string file = path;
  if (std::filesystem::is_directory(path, error)) {
    file = tokenizer_in_folder(path);
    if (file.empty())
      refuse_tokenizer(path, fmt::format("the folder has neither \"{}\" nor \"{}\"", kTokenizerName,
                                         kVocabularyName));
  }
  // GPT-2's vocabulary has no "model": its keys are tokens.
  return std::filesystem::path(file).filename() == kVocabularyName
             ? read_vocabulary_and_merges(file)
             : read_tokenizer_json(file);
}

}  // namespace sluice
