// Byte-pair encoding over bytes, as in GPT-2 (Sennrich et al. 2016, "Neural Machine Translation of
// Rare Words with Subword Units"). A word begins as one token for each byte. Then the pair of
// neighbours with the lowest rank is merged, again and again, until the list of merges has no pair
// of neighbours.
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
  // `vocabulary` maps a token's bytes to its id. `merges` has pairs of tokens by their bytes. The
  // rank of a pair is its place in the list.
  // Fails with kInput if the vocabulary lacks a token that a merge takes or makes.
  ByteBpe(const std::unordered_map<std::string, TokenId>& vocabulary,
          std::span<const std::pair<std::string, std::string>> merges);

  // The token of a single byte. The result is empty if the vocabulary has no such token.
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
    bool is_merged = false;  // into the symbol before it
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
