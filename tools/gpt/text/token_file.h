// Turns a text into a file of tokens that training reads. The file has the format of llm.c: a
// header, and then 16 bits per token. If the tokenizer has more than 65,536 tokens, each token has
// 32 bits. llm.c leaves some words of the header empty. Sluice uses the empty words to identify the
// text and the tokenizer from which the file was made.
//
// Thread rule: one thread.
#pragma once

#include <sys/types.h>

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

// Reads `text_file` piece by piece and writes the tokens of the text to `output`. Returns the
// number of tokens. If the output is no regular file, the text is read twice.
// Fails with the errors of OutputFile, and with kInput in these cases:
// - The text cannot be read, or is empty.
// - The text has more tokens than a header can count (2^32 - 1).
// - The text contains a byte for which the tokenizer has no token.
// - The text contains more than 64 MiB without a space or line end.
std::uint64_t write_token_file(const std::string& text_file, Tokenizer& tokenizer,
                               OutputFile& output);

// Returns the path of a token file beside `text_file`. If the same tokenizer has already made such
// a file from the same bytes, the function uses the existing file. Otherwise, the function makes
// the file, and replaces a file that was made from an older text or has been cut. If several
// processes need the same file, a lock on the text lets one process at a time run this function.
// Fails with the errors of write_token_file(). Fails with kInput if the path belongs to a file that
// this function did not make.
std::string token_file_beside(const std::string& text_file, Tokenizer& tokenizer, bool is_quiet);

// Returns why a file cannot be a text if it is no regular file. `mode` is the one of stat().
const char* no_text_because(mode_t mode);

// Returns whether `file` begins with the header of a token file. If the file cannot be read, the
// result is false.
bool has_token_header(const std::string& file);
// Returns true if `file` is a token file whose header names a tokenizer other than `tokenizer`.
// Files from llm.c do not name a tokenizer.
bool is_of_other_tokenizer(const std::string& file, const Tokenizer& tokenizer);

}  // namespace sluice
