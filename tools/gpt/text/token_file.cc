#include "tools/gpt/text/token_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/unique_fd.h"
#include "io/checksum.h"
#include "io/errno_action.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/gpt/text/gpt2_words.h"

namespace sluice {
namespace {

constexpr std::size_t kTextPieceBytes = 4 << 20;
// Merging takes some 50 bytes for each byte of a word.
constexpr std::size_t kUncutBytesMax = 64 << 20;

// Word 0: magic number. 1: version. 2: number of tokens. Then, unused by llm.c: 3 a mark of this
// project, 4-5 the text's bytes, 6-9 its checksum, 10-13 that of the tokenizer's files.
using TokenHeader = std::array<std::uint32_t, kTokenHeaderBytes / 4>;
constexpr std::uint32_t kOriginMark = 0x31544C53;  // "SLT1"
constexpr std::ptrdiff_t kTokenizerSumWord = 10;

[[noreturn]] void refuse_text(const std::string& file, const std::string& why) {
  throw Error(ErrorCode::kInput, fmt::format("text \"{}\": {}", file, why));
}

struct TextOrigin {
  std::uint64_t text_bytes = 0;
  Checksum128 text_sum;
  Checksum128 tokenizer_sum;
};

TokenHeader header_of(const TokenFileKind& kind, std::uint64_t tokens, const TextOrigin& origin) {
  TokenHeader words{kind.magic, kind.version, static_cast<std::uint32_t>(tokens), kOriginMark};
  std::size_t next = 4;
  for (const std::uint64_t value : {origin.text_bytes, origin.text_sum.low, origin.text_sum.high,
                                    origin.tokenizer_sum.low, origin.tokenizer_sum.high}) {
    words[next++] = static_cast<std::uint32_t>(value);
    words[next++] = static_cast<std::uint32_t>(value >> 32);
  }
  return words;
}

std::optional<TokenHeader> read_header(const std::string& path) {
  std::error_code ignored;  // opening a pipe without a writer would wait forever
  if (!std::filesystem::is_regular_file(path, ignored)) return std::nullopt;
  TokenHeader words{};
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(words.data()), sizeof words);
  if (!file) return std::nullopt;
  return words;
}

// The sum of the text says nothing of tokens that are missing: a copy may have been cut.
bool has_all_tokens(const std::string& path, const TokenHeader& header, const TokenFileKind& kind) {
  std::error_code no_answer;
  return std::filesystem::file_size(path, no_answer) ==
         kTokenHeaderBytes + std::uint64_t{header[2]} * kind.token_bytes;
}

const TokenFileKind& kind_for(const Tokenizer& tokenizer) {
  return kTokenFileKinds[tokenizer.token_count() <= 1u << 16 ? 0 : 1];
}

// The text piece by piece, with a checksum of the pieces' checksums.
class TextReader {
 public:
  explicit TextReader(const std::string& path) : path_(path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0)
      refuse_text(path, fmt::format("cannot open it: {}", errno_text(errno)));
    if (!S_ISREG(status.st_mode)) refuse_text(path, no_text_because(status.st_mode));
    if (status.st_size == 0) refuse_text(path, "it is empty");
    file_.open(path, std::ios::binary);
    if (!file_) refuse_text(path, fmt::format("cannot open it: {}", errno_text(errno)));
  }

  // Appends the next piece. False: the text has ended.
  bool read(std::string& text) {
    const std::size_t before = text.size();
    text.resize(before + kTextPieceBytes);
    file_.read(text.data() + before, kTextPieceBytes);
    if (file_.bad()) refuse_text(path_, fmt::format("cannot read it: {}", errno_text(errno)));
    text.resize(before + static_cast<std::size_t>(file_.gcount()));
    if (text.size() == before) return false;
    sums_.push_back(checksum128(std::as_bytes(std::span(text).subspan(before))));
    bytes_ += text.size() - before;
    return true;
  }

  TextOrigin origin(const Tokenizer& tokenizer) const {
    return {.text_bytes = bytes_,
            .text_sum = checksum128(std::as_bytes(std::span(sums_))),
            .tokenizer_sum = tokenizer.checksum()};
  }

 private:
  std::string path_;
  std::ifstream file_;
  std::vector<Checksum128> sums_;
  std::uint64_t bytes_ = 0;
};

TextOrigin origin_of(const std::string& text_file, const Tokenizer& tokenizer) {
  TextReader reader(text_file);
  for (std::string piece; reader.read(piece);) piece.clear();
  return reader.origin(tokenizer);
}

// The last place where `text` can be cut; 0 where more of it is needed. Looks behind `searched`,
// which becomes the end of the part that has been looked at.
std::size_t cut_of(std::string_view text, const Tokenizer& tokenizer, std::size_t& searched) {
  std::size_t limit = text.size() - std::min(text.size(), tokenizer.added_bytes_max() + 1);
  const std::size_t from = std::exchange(searched, limit);
  while (limit > from) {
    const std::size_t cut = gpt2_cut_bytes(text, limit, from);
    if (cut == 0 || tokenizer.can_cut(text, cut)) return cut;
    limit = cut - 1;
  }
  return 0;
}

struct TokenizedText {
  std::uint64_t token_count = 0;
  TextOrigin origin;
};

// Calls sink(tokens) for each piece of the text.
template <class Sink>
TokenizedText tokenize_text(const std::string& text_file, Tokenizer& tokenizer, const Sink& sink) {
  TextReader reader(text_file);
  std::string text;
  std::vector<TokenId> tokens;
  std::uint64_t count = 0, offset = 0;
  std::size_t searched = 0;
  const auto encode = [&](std::size_t bytes) {
    tokens.clear();
    tokenizer.encode(std::string_view(text).substr(0, bytes), tokens, offset);
    count += tokens.size();
    if (count > std::numeric_limits<std::uint32_t>::max())
      refuse_text(text_file,
                  "it has more tokens than a token file's header can count, 4294967295; "
                  "split the text");
    sink(std::span<const TokenId>(tokens));
    offset += bytes;
    text.erase(0, bytes);
    searched = 0;
  };
  while (reader.read(text)) {
    if (const std::size_t cut = cut_of(text, tokenizer, searched); cut != 0) encode(cut);
    if (text.size() > kUncutBytesMax)
      refuse_text(text_file, fmt::format("more than {} bytes from byte {} on have no space and no "
                                         "line end between them; put line ends in",
                                         kUncutBytesMax, offset));
  }
  encode(text.size());
  return {.token_count = count, .origin = reader.origin(tokenizer)};
}

void write_tokens(std::span<const TokenId> tokens, std::uint32_t token_bytes, OutputFile& output) {
  std::string bytes;
  bytes.reserve(tokens.size() * token_bytes);
  for (const TokenId token : tokens) {
    for (std::uint32_t byte = 0; byte < token_bytes; ++byte)
      bytes += static_cast<char>(token >> (8 * byte));
  }
  output.write(bytes);
}

void write_header(const TokenHeader& header, OutputFile& output) {
  const ssize_t written = ::pwrite(output.descriptor(), header.data(), sizeof header, 0);
  if (written != static_cast<ssize_t>(sizeof header))
    throw output.failure("write the header of", written < 0 ? errno : ENOSPC);
}

}  // namespace

std::uint64_t write_token_file(const std::string& text_file, Tokenizer& tokenizer,
                               OutputFile& output) {
  const TokenFileKind& kind = kind_for(tokenizer);
  const auto write = [&](std::span<const TokenId> tokens) {
    write_tokens(tokens, kind.token_bytes, output);
  };
  output.begin();
  // The header counts the tokens. A pipe takes it first, so the tokens are counted before.
  const bool is_counted_first = !output.is_regular();
  TokenizedText text;
  if (is_counted_first) text = tokenize_text(text_file, tokenizer, [](auto) {});
  const TokenHeader early = header_of(kind, text.token_count, text.origin);
  output.write({reinterpret_cast<const char*>(early.data()), sizeof early});
  text = tokenize_text(text_file, tokenizer, write);
  if (!is_counted_first) write_header(header_of(kind, text.token_count, text.origin), output);
  output.commit();
  return text.token_count;
}

const char* no_text_because(mode_t mode) {
  return S_ISDIR(mode) ? "it is a folder and not a regular file; name a file in it, or join its "
                         "files with `cat DIR/* > FILE`"
                       : "it is not a regular file";
}

bool has_token_header(const std::string& file) {
  const auto header = read_header(file);
  return header && std::ranges::any_of(kTokenFileKinds, [&](const TokenFileKind& kind) {
           return (*header)[0] == kind.magic;
         });
}

bool is_of_other_tokenizer(const std::string& file, const Tokenizer& tokenizer) {
  const auto header = read_header(file);
  if (!header || !has_token_header(file) || (*header)[3] != kOriginMark) return false;
  TextOrigin origin;
  origin.tokenizer_sum = tokenizer.checksum();
  const TokenHeader own = header_of(kind_for(tokenizer), 0, origin);
  return !std::equal(header->begin() + kTokenizerSumWord, header->begin() + kTokenizerSumWord + 4,
                     own.begin() + kTokenizerSumWord);
}

std::string token_file_beside(const std::string& text_file, Tokenizer& tokenizer, bool is_quiet) {
  const std::string path =
      fmt::format("{}.{}.tokens", text_file, hex_of(tokenizer.checksum()).substr(0, 8));
  const UniqueFd lock(::open(text_file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!lock) refuse_text(text_file, fmt::format("cannot open it: {}", errno_text(errno)));
  // Ranks on one host: the first makes the file. Where locks are not to be had, each makes its own,
  // and the last one's name stays.
  while (::flock(lock.get(), LOCK_EX) != 0 && errno == EINTR) {
  }
  std::optional<Progress> progress(std::in_place, "looking at the text", is_quiet);
  const TextOrigin origin = origin_of(text_file, tokenizer);
  if (const auto found = read_header(path)) {
    const TokenFileKind& kind = kind_for(tokenizer);
    const bool is_of_text = *found == header_of(kind, (*found)[2], origin);
    if (is_of_text && has_all_tokens(path, *found, kind)) return path;
    if ((*found)[3] != kOriginMark)
      throw Error(ErrorCode::kInput,
                  fmt::format("the tokens of \"{}\" would be written to \"{}\", where there is a "
                              "file of another origin; move it away",
                              text_file, path));
  }
  progress->set("tokenizing the text");
  OutputFiles files;
  files.add_input("the text", text_file);
  OutputFile& output = files.add("the token file", path);
  files.check();
  const std::uint64_t count = write_token_file(text_file, tokenizer, output);
  progress.reset();
  if (!is_quiet) say("{} tokens of \"{}\" written to \"{}\"\n", count, text_file, path);
  return path;
}

}  // namespace sluice
