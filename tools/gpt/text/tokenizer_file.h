// The functions read the files of byte-level BPE tokenizers. A tokenizer is stored in one file or
// in two files. A single file is the `tokenizer.json` of Hugging Face's package `tokenizers`. A
// pair of files is vocab.json and merges.txt. GPT-2 has such a pair.
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
  bool is_normalized = false;  // true: searched for in the text between the other added tokens
};

// The content of a tokenizer's files, as plain data.
struct TokenizerFile {
  std::string path;                                     // the name that messages give to the file
  std::unordered_map<std::string, TokenId> vocabulary;  // the key is the token's bytes
  std::vector<std::pair<std::string, std::string>> merges;
  std::vector<AddedToken> added;
  bool adds_space = false;  // add_prefix_space: adds a space if a text begins without a space
  Checksum128 checksum;     // of the files
};

// Returns the name of the tokenizer's file in the folder of a model. Returns an empty text if there
// is no such file.
std::string tokenizer_in_folder(const std::string& folder);

// Returns the file that read_tokenizer() reads beside the file `path`: merges.txt beside a
// vocab.json. Returns an empty text for another name.
std::string merges_beside(const std::string& path);

// `path` is a tokenizer.json, or a vocab.json with merges.txt in the same folder, or a folder that
// contains such files.
// Fails with kInput if a file cannot be read, is damaged, or describes another kind of tokenizer.
// The message names the file and the wrong part of the file. If the file describes another kind of
// tokenizer, the message also names that kind.
TokenizerFile read_tokenizer(const std::string& path);

}  // namespace sluice
