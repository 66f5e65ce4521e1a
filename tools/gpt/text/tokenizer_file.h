// The functions read the files of byte-level BPE tokenizers. Such files are `tokenizer.json` of the
// tokenizers package, or GPT-2's vocab.json with merges.txt beside it.
//
// Thread rule: any thread.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/checksum.h"
#include "tools/gpt/text/byte_bpe.h"

namespace sluice {

// A token that is found in a text before the text is split into words.
struct AddedToken {
  std::string bytes;
  TokenId id = 0;
  bool is_normalized = false;  // looked for only where no other kind of added token is
};

// The content of a tokenizer's files. Plain data.
struct TokenizerFile {
  std::string path;                                     // the file as named in messages
  std::unordered_map<std::string, TokenId> vocabulary;  // by the bytes that a token stands for
  std::vector<std::pair<std::string, std::string>> merges;
  std::vector<AddedToken> added;
  bool adds_space = false;  // before a text that does not begin with one (add_prefix_space)
  Checksum128 checksum;     // of the files
};

// The name of the tokenizer's file in the folder of a model. The result is empty if there is no
// such file.
std::string tokenizer_in_folder(const std::string& folder);

// `path` is a tokenizer.json, a vocab.json with merges.txt beside it, or a folder with either.
// Fails with kInput if the file cannot be read, is damaged, or is a tokenizer of another kind. The
// message names the file, the part of it, and the kind.
TokenizerFile read_tokenizer(const std::string& path);

}  // namespace sluice
