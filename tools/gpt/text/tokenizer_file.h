// The functions read the files of byte-level BPE tokenizers. A tokenizer is either one file, the
// `tokenizer.json` of Hugging Face's package `tokenizers`, or GPT-2's two files vocab.json and
// merges.txt.
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

// A token that the tokenizer looks for before it splits a text into words.
struct AddedToken {
  std::string bytes;
  TokenId id = 0;
  bool is_normalized = false;  // looked for only where no other kind of added token is
};

// The content of a tokenizer's files, as plain data.
struct TokenizerFile {
  std::string path;                                     // the file as named in messages
  std::unordered_map<std::string, TokenId> vocabulary;  // by the bytes that a token stands for
  std::vector<std::pair<std::string, std::string>> merges;
  std::vector<AddedToken> added;
  bool adds_space = false;  // before a text that does not begin with one (add_prefix_space)
  Checksum128 checksum;     // of the files
};

// Returns the name of the tokenizer's file in the folder of a model. Returns an empty text if there
// is no such file.
std::string tokenizer_in_folder(const std::string& folder);

// `path` is a tokenizer.json, or a vocab.json with merges.txt in the same folder, or a folder that
// contains one of these. Fails with kInput if the file cannot be read, is damaged, or describes
// another kind of tokenizer. The message names the file and the part of the file, and also the
// kind.
TokenizerFile read_tokenizer(const std::string& path);

}  // namespace sluice
