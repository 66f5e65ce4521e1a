#include "tools/gpt/text/tokenizer.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/error.h>
#include "tools/gpt/text/gpt2_words.h"

namespace sluice {
namespace {

// About 10 MiB. A text has far fewer common words.
constexpr std::size_t kWordsMax = 1 << 16;
constexpr std::size_t kWordBytesMax = 64;

}  // namespace

Tokenizer::Tokenizer(const std::string& path) : Tokenizer(read_tokenizer(path)) {}

Tokenizer::Tokenizer(const TokenizerFile& file)
    : path_(file.path),
      checksum_(file.checksum),
      bpe_(file.vocabulary, file.merges),
      adds_space_(file.adds_space),
      added_(file.added) {
  const auto set = [this](TokenId id, const std::string& bytes) {
    if (bytes_.size() <= id) bytes_.resize(std::size_t{id} + 1);
    bytes_[id] = bytes;
  };
  for (const auto& [bytes, id] : file.vocabulary) set(id, bytes);
  for (const AddedToken& token : added_) {
    set(token.id, token.bytes);
    begins_added_[static_cast<unsigned char>(token.bytes[0])] = true;
    added_bytes_max_ = std::max(added_bytes_max_, token.bytes.size());
  }
  // The longest of those that begin at one place is found.
  std::ranges::stable_sort(added_, std::ranges::greater{},
                           [](const AddedToken& token) { return token.bytes.size(); });
}

std::string_view Tokenizer::bytes_of(TokenId token) const {
  return token < bytes_.size() ? std::string_view(bytes_[token]) : std::string_view();
}

const AddedToken* Tokenizer::added_at(std::string_view text, std::size_t at,
                                      bool is_normalized) const {
  if (!begins_added_[static_cast<unsigned char>(text[at])]) return nullptr;
  for (const AddedToken& token : added_) {
    if (token.is_normalized == is_normalized && text.substr(at).starts_with(token.bytes))
      return &token;
  }
  return nullptr;
}

bool Tokenizer::can_cut(std::string_view text, std::size_t cut_bytes) const {
  for (std::size_t at = cut_bytes - std::min(cut_bytes, added_bytes_max_); at < cut_bytes; ++at) {
    for (const AddedToken& token : added_) {
      const std::size_t end = at + token.bytes.size();
      // Behind an added token stands a space that only the whole text shows.
      const bool is_in_the_way = end > cut_bytes || (adds_space_ && end == cut_bytes);
      if (is_in_the_way && text.substr(at).starts_with(token.bytes)) return false;
    }
  }
  return true;
}

void Tokenizer::encode(std::string_view text, std::vector<TokenId>& tokens,
                       std::uint64_t offset_bytes) {
  const Part whole{.text = text, .offset_bytes = offset_bytes, .is_start = offset_bytes == 0};
  split_added(whole, /*is_normalized=*/false, tokens);
}

// The tokens that are not normalized are found first, in the whole text, and the others between
// them.
void Tokenizer::split_added(const Part& whole, bool is_normalized, std::vector<TokenId>& tokens) {
  const auto encode_part = [&](std::size_t begin, std::size_t end) {
    if (begin == end) return;
    const Part part{.text = whole.text.substr(begin, end - begin),
                    .offset_bytes = whole.offset_bytes + begin,
                    .is_start = begin != 0 || whole.is_start};
    if (is_normalized)
      encode_words(part, tokens);
    else
      split_added(part, /*is_normalized=*/true, tokens);
  };
  std::size_t begin = 0;
  for (std::size_t at = 0; !added_.empty() && at < whole.text.size();) {
    const AddedToken* const found = added_at(whole.text, at, is_normalized);
    if (found == nullptr) {
      ++at;
      continue;
    }
    encode_part(begin, at);
    tokens.push_back(found->id);
    begin = at += found->bytes.size();
  }
  encode_part(begin, whole.text.size());
}

void Tokenizer::encode_words(const Part& part, std::vector<TokenId>& tokens) {
  const bool gets_space = adds_space_ && part.is_start && !part.text.starts_with(' ');
  const std::string with_space = gets_space ? " " + std::string(part.text) : std::string();
  const std::string_view text = gets_space ? with_space : part.text;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t size = gpt2_word_bytes(text.substr(at));
    encode_word(text.substr(at, size), part.offset_bytes + at - (gets_space && at > 0 ? 1 : 0),
                tokens);
    at += size;
  }
}

void Tokenizer::encode_word(std::string_view word, std::uint64_t offset_bytes,
                            std::vector<TokenId>& tokens) {
  const bool is_remembered = word.size() <= kWordBytesMax;
  if (is_remembered) {
    const auto known = words_.find(std::string(word));
    if (known != words_.end()) {
      tokens.insert(tokens.end(), known->second.begin(), known->second.end());
      return;
    }
  }
  for (const char letter : word) {
    const auto byte = static_cast<unsigned char>(letter);
    if (!bpe_.token_of(byte))
      throw Error(ErrorCode::kInput,
                  fmt::format("tokenizer \"{}\" has no token for the byte {:#04x} in the word at "
                              "byte {} of the text; train it with all 256 bytes (initial_alphabet "
                              "of the tokenizers package), or take the byte out of the text",
                              path_, byte, offset_bytes));
  }
  const std::size_t before = tokens.size();
  bpe_.append_tokens(word, tokens);
  if (is_remembered && words_.size() < kWordsMax)
    words_.emplace(word, std::vector<TokenId>(tokens.begin() + static_cast<std::ptrdiff_t>(before),
                                              tokens.end()));
}

}  // namespace sluice
