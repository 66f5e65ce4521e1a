// Byte-pair encoding over bytes, as in GPT-2 (Sennrich et al. 2016, "Neural Machine Translation of
// Rare Words with Subword Units"). At first, each byte of a word is one token. Then two
// neighbouring tokens are merged into one token, again and again. Each merge takes the pair of
// neighbours that has the lowest rank. The merging ends when no pair of neighbours is in the list
// of merges.
//
// Thread rule: any thread. Constant after construction.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sluice {

using TokenId = std::uint32_t;

class ByteBpe {
 public:
  // `vocabulary` maps the bytes of each token to the token's id. `merges` is a list of pairs of
  // tokens. Each token in a pair is given by its bytes. The rank of a pair is its place in the
  // list.
  // Fails with kInput if the vocabulary lacks a token that a merge needs or produces.
  ByteBpe(const std::unordered_map<std::string, TokenId>& vocabulary,
          std::span<const std::pair<std::string, std::string>> merges);

  // Returns the token of a single byte. Returns nothing if the vocabulary has no such token.
  std::optional<TokenId> token_of(unsigned char byte) const { return of_byte_[byte]; }

  // Appends the tokens of `word`. Requires: each byte of the word has a token.
  void append_tokens(std::string_view word, std::vector<TokenId>& tokens) const;

 private:
  struct Merge {
    std::uint32_t rank = 0;
    TokenId into = 0;
  };
  struct Symbol {
    TokenId token = 0;
    std::ptrdiff_t previous = -1;
    std::ptrdiff_t next = -1;
    bool is_merged = false;  // true: merged into the previous symbol
  };
  struct Candidate {
    std::uint32_t rank = 0;
    std::ptrdiff_t place = 0;  // of the left symbol
    TokenId into = 0;
  };

  static std::uint64_t key(TokenId left, TokenId right) {
    return std::uint64_t{left} << 32 | right;
  }
  const Merge* find(TokenId left, TokenId right) const;

  std::array<std::optional<TokenId>, 256> of_byte_;
  std::unordered_map<std::uint64_t, Merge> merges_;
};

}  // namespace sluice
