// A byte-level BPE tokenizer. For texts in UTF-8, the tokenizer produces the same tokens as Hugging
// Face's package `tokenizers`. The tokenizer keeps bytes that are not UTF-8. Decoding therefore
// always gives the original text.
//
// Thread rule: any thread. However, only one thread at a time may call encode(), because encode()
// remembers words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tools/gpt/text/byte_bpe.h"
#include "tools/gpt/text/tokenizer_file.h"

namespace sluice {

class Tokenizer {
 public:
  // Fails with the errors of read_tokenizer() and ByteBpe.
  explicit Tokenizer(const std::string& path);

  const std::string& path() const { return path_; }
  const Checksum128& checksum() const { return checksum_; }
  // The largest token id plus one. The config's model.vocabulary must be at least this number.
  TokenId token_count() const { return static_cast<TokenId>(bytes_.size()); }
  // The length of the longest added token in bytes; 0 = no added tokens. The tokenizer finds added
  // tokens before it splits the text into words.
  std::size_t added_bytes_max() const { return added_bytes_max_; }

  // Returns true if the tokens of `text` stay the same when `text` is cut at `cut_bytes`. The
  // result is false if `cut_bytes` is inside an added token. The result is also false if
  // `cut_bytes` is the end of an added token and the tokenizer adds a space after this token.
  // Requires: `text` contains at least added_bytes_max() bytes after the cut, or all bytes up to
  // the end of the whole text.
  bool can_cut(std::string_view text, std::size_t cut_bytes) const;

  // Appends the tokens of `text` to `tokens`. `text` may be a part of a longer text. `offset_bytes`
  // is the place of `text` in the longer text. Error messages name places in the longer text. If
  // the tokenizer has add_prefix_space, a space is added only at the start of the longer text. The
  // tokenizer treats a special token in the text like any other added token. The tokenizer adds no
  // special token at the start or at the end of the text.
  // Fails with kInput if a byte has no token.
  void encode(std::string_view text, std::vector<TokenId>& tokens, std::uint64_t offset_bytes = 0);

  // Returns the bytes of a token. Returns an empty text if no token has the id `token`.
  std::string_view bytes_of(TokenId token) const;

 private:
  // A part of a text. A part begins after an added token or at the start of the text. A part ends
  // before an added token or at the end of the text.
  struct Part {
    std::string_view text;
    std::uint64_t offset_bytes = 0;
    bool is_start = false;  // the text starts here, or an added token precedes the part
  };

  explicit Tokenizer(const TokenizerFile& file);
  const AddedToken* added_at(std::string_view text, std::size_t at, bool is_normalized) const;
  void split_added(const Part& whole, bool is_normalized, std::vector<TokenId>& tokens);
  void encode_words(const Part& part, std::vector<TokenId>& tokens);
  void encode_word(std::string_view word, std::uint64_t offset_bytes, std::vector<TokenId>& tokens);

  // Constant after construction.
  std::string path_;
  Checksum128 checksum_;
  ByteBpe bpe_;
  bool adds_space_;
  std::vector<AddedToken> added_;  // longest first
  std::array<bool, 256> begins_added_{};
  std::size_t added_bytes_max_ = 0;
  std::vector<std::string> bytes_;  // of each id

  std::unordered_map<std::string, std::vector<TokenId>> words_;  // tokens of some words seen so far
};

}  // namespace sluice
