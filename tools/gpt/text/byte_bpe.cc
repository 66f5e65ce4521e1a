#include "tools/gpt/text/byte_bpe.h"

#include <queue>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {
namespace {

TokenId require_token(const std::unordered_map<std::string, TokenId>& vocabulary,
                      const std::string& bytes, std::size_t rank) {
  const auto found = vocabulary.find(bytes);
  if (found == vocabulary.end())
    throw Error(ErrorCode::kInput,
                fmt::format("merge {} needs the token \"{}\", which is not in the vocabulary; the "
                            "merges are of another tokenizer",
                            rank + 1, bytes));
  return found->second;
}

}  // namespace

ByteBpe::ByteBpe(const std::unordered_map<std::string, TokenId>& vocabulary,
                 std::span<const std::pair<std::string, std::string>> merges) {
  for (std::size_t byte = 0; byte < of_byte_.size(); ++byte) {
    const auto found = vocabulary.find(std::string(1, static_cast<char>(byte)));
    if (found != vocabulary.end()) of_byte_[byte] = found->second;
  }
  merges_.reserve(merges.size());
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const TokenId from = require_token(vocabulary, left, rank);
    const TokenId with = require_token(vocabulary, right, rank);
    merges_[key(from, with)] = {.rank = static_cast<std::uint32_t>(rank),
                                .into = require_token(vocabulary, left + right, rank)};
  }
}

const ByteBpe::Merge* ByteBpe::find(TokenId left, TokenId right) const {
  const auto found = merges_.find(key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

// A queue of pairs and a linked list of symbols: a word of n bytes takes n log n steps, so that a
// text without spaces is no trap. A pair whose symbols have been merged meanwhile is passed over
// when its turn comes.
void ByteBpe::append_tokens(std::string_view word, std::vector<TokenId>& tokens) const {
  const auto count = static_cast<std::ptrdiff_t>(word.size());
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  for (std::ptrdiff_t at = 0; at < count; ++at)
    symbols.push_back({.token = *of_byte_[static_cast<unsigned char>(word[at])],
                       .previous = at - 1,
                       .next = at + 1 < count ? at + 1 : -1,
                       .is_merged = false});
  const auto comes_later = [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.place > b.place;
  };
  std::priority_queue<Candidate, std::vector<Candidate>, decltype(comes_later)> queue(comes_later);
  const auto offer = [&](std::ptrdiff_t left) {
    if (left < 0 || symbols[left].next < 0) return;
    const Merge* const merge = find(symbols[left].token, symbols[symbols[left].next].token);
    if (merge != nullptr) queue.push({.rank = merge->rank, .place = left, .into = merge->into});
  };
  for (std::ptrdiff_t at = 0; at < count; ++at) offer(at);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[best.place];
    if (left.is_merged || left.next < 0) continue;
    Symbol& right = symbols[left.next];
    const Merge* const merge = find(left.token, right.token);
    if (merge == nullptr || merge->into != best.into) continue;
    left.token = best.into;
    left.next = right.next;
    right.is_merged = true;
    if (left.next >= 0) symbols[left.next].previous = best.place;
    offer(left.previous);
    offer(best.place);
  }
  for (const Symbol& symbol : symbols) {
    if (!symbol.is_merged) tokens.push_back(symbol.token);
  }
}

}  // namespace sluice
