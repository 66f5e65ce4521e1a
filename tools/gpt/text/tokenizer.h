// A byte-level BPE tokenizer. On texts in UTF-8, the tokenizer gives the same tokens as the
// tokenizers package. Other texts keep their bytes, so decoding gives back every text.
//
// Thread rule: any thread. Only one thread at a time calls encode(), which remembers words.
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
  // One more than the largest id. model.vocabulary has to be at least this number.
  TokenId token_count() const { return static_cast<TokenId>(bytes_.size()); }
  // The length of the longest token that is found before words are split. The length is 0 if there
  // is no such token.
  std::size_t added_bytes_max() const { return added_bytes_max_; }

  // Whether a cut at `cut_bytes` keeps the tokens of the text. The cut must not be inside an added
  // token. The cut must not be at the end of an added token either, if a space is added there.
  // Requires: behind the cut, the text goes on for added_bytes_max(), or ends earlier.
  bool can_cut(std::string_view text, std::size_t cut_bytes) const;

  // Appends the tokens of `text`, which begins at `offset_bytes` of a longer text. Messages name
  // that place. With add_prefix_space, a space is added only where the longer text begins. Special
  // tokens in the text are found like other tokens. No special token is added at the ends.
  // Fails with kInput if a byte has no token.
  void encode(std::string_view text, std::vector<TokenId>& tokens, std::uint64_t offset_bytes = 0);

  // The bytes of a token. The result is empty for an id that no token has.
  std::string_view bytes_of(TokenId token) const;

 private:
  // A part of a text between added tokens.
  struct Part {
    std::string_view text;
    std::uint64_t offset_bytes = 0;
    bool is_start = false;  // of a text, or behind an added token
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

  std::unordered_map<std::string, std::vector<TokenId>> words_;  // a part of the words seen so far
};

}  // namespace sluice
