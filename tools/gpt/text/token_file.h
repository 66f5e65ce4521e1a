// Turns a text into a file of tokens that training reads. The format is that of llm.c, with a
// header and 16 bits per token. If the tokenizer has more than 65,536 tokens, a token has 32 bits.
// Some words of the header are empty in llm.c's files. In this file, the words name the text and
// the tokenizer that the file was made from.
//
// Thread rule: one thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "tools/cli/output_file.h"
#include "tools/gpt/text/tokenizer.h"

namespace sluice {

// The header has 256 little-endian words of 32 bits.
constexpr std::uint32_t kTokenHeaderBytes = 1024;

// One of the two kinds of token files.
struct TokenFileKind {
  std::uint32_t magic = 0;
  std::uint32_t version = 0;
  std::uint32_t token_bytes = 0;
};
constexpr std::array<TokenFileKind, 2> kTokenFileKinds{
    TokenFileKind{.magic = 20240520, .version = 1, .token_bytes = 2},
    TokenFileKind{.magic = 20240801, .version = 7, .token_bytes = 4}};

// Reads `text_file` piece by piece and writes its tokens. Returns the number of tokens. For an
// output that is no regular file, the text is read twice.
// Fails with the errors of OutputFile, and with kInput in these cases:
// - The text cannot be read, or is empty.
// - The text has more tokens than a header can count (2^32 - 1).
// - The text has a byte without a token.
// - The text has more than 64 MiB without a space or line end.
std::uint64_t write_token_file(const std::string& text_file, Tokenizer& tokenizer,
                               OutputFile& output);

// Returns the path of the token file beside `text_file`. If there is no such file, the call makes
// the file. If the same tokenizer made the file from the same bytes, the file is used again. A file
// of an older text is replaced. Processes that want the same file take turns.
// Fails with the errors of write_token_file(), and with kInput if a file of that name has another
// origin.
std::string token_file_beside(const std::string& text_file, Tokenizer& tokenizer, bool is_quiet);

// Whether `file` begins with the header of a token file. The result is also false if the file
// cannot be read.
bool has_token_header(const std::string& file);
// Whether `file` is a token file that names another tokenizer. The files of llm.c name no
// tokenizer.
bool is_of_other_tokenizer(const std::string& file, const Tokenizer& tokenizer);

}  // namespace sluice
