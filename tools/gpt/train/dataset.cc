#include "tools/gpt/train/dataset.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <unordered_map>

#include <fmt/format.h>

#include <sluice/error.h>
#include "io/errno_action.h"
#include "io/transfer_progress.h"
#include "tools/gpt/model/counter_random.h"
#include "tools/gpt/text/token_file.h"

namespace sluice {
namespace {

// Tokens looked at together where the whole file is.
constexpr std::uint64_t kPieceTokens = 1 << 20;
constexpr std::uint32_t kVocabularyMax = 1 << 24;  // of the config's schema

std::uint64_t pair_of(std::uint32_t first, std::uint32_t second) {
  return std::uint64_t{first} << 32 | second;
}

[[noreturn]] void fail(const std::string& file, const std::string& why) {
  throw Error(ErrorCode::kInput, fmt::format("data file \"{}\": {}", file, why));
}

}  // namespace

Dataset::Dataset(const TrainConfig& config, std::uint32_t rank_count)
    : config_(config), micro_batches_(std::uint64_t{config.micro_batches} * rank_count) {
  if (config_.data_file.empty())
    throw Error(ErrorCode::kConfig,
                "no data file is given; set data.file in the config or pass --data FILE");
  open_file();
  detect_format();
  const std::uint64_t needed = std::uint64_t{config_.model.context} + 1;
  if (token_count_ < 2 * needed)
    fail(config_.data_file, fmt::format("it has {} tokens, but training and validation need at "
                                        "least {} (one sequence of model.context = {} and its "
                                        "successor each); use a longer text or a shorter context",
                                        token_count_, 2 * needed, config_.model.context));
  const auto wanted = static_cast<std::uint64_t>(
      std::llround(static_cast<double>(token_count_) * config_.validation_fraction));
  training_tokens_ = token_count_ - std::clamp(wanted, needed, token_count_ - needed);
  check_tokens();
}

void Dataset::open_file() {
  // O_NONBLOCK: opening a pipe without a writer would wait forever.
  file_ = UniqueFd(::open(config_.data_file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file_ || ::fstat(file_.get(), &status) != 0)
    fail(config_.data_file, "cannot open it: " + errno_text(errno) +
                                "; name another in data.file or with --data FILE");
  if (!S_ISREG(status.st_mode)) fail(config_.data_file, no_text_because(status.st_mode));
  if (status.st_size == 0) fail(config_.data_file, "it is empty");
  file_bytes_ = static_cast<std::uint64_t>(status.st_size);
}

void Dataset::detect_format() {
  token_count_ = file_bytes_;
  if (config_.data_format == TokenFormat::kBytes) return;
  std::array<std::uint32_t, 3> header{};
  if (file_bytes_ >= kTokenHeaderBytes)
    read_bytes(0, {reinterpret_cast<unsigned char*>(header.data()), sizeof header});
  const auto kind = std::ranges::find(kTokenFileKinds, header[0], &TokenFileKind::magic);
  const bool has_header = kind != kTokenFileKinds.end();
  if (config_.data_format == TokenFormat::kAuto && !has_header) return;
  const std::uint32_t wanted_bytes = config_.data_format == TokenFormat::kUint32 ? 4 : 2;
  token_bytes_ = has_header ? kind->token_bytes : wanted_bytes;
  if (has_header && header[1] != kind->version)
    fail(config_.data_file,
         fmt::format("its header says version {} of the token format; only {} is known", header[1],
                     kind->version));
  if (config_.data_format != TokenFormat::kAuto && token_bytes_ != wanted_bytes)
    fail(config_.data_file, fmt::format("data.format is \"uint{}\", but its header says uint{}; "
                                        "use \"auto\"",
                                        8 * wanted_bytes, 8 * token_bytes_));
  header_bytes_ = has_header ? kTokenHeaderBytes : 0;
  token_count_ = (file_bytes_ - header_bytes_) / token_bytes_;
  if ((file_bytes_ - header_bytes_) % token_bytes_ != 0)
    fail(config_.data_file, fmt::format("its {} bytes are no whole number of uint{} tokens",
                                        file_bytes_ - header_bytes_, 8 * token_bytes_));
  if (has_header && header[2] != token_count_)
    fail(config_.data_file,
         fmt::format("its header promises {} tokens, but {} follow; it is cut or damaged",
                     header[2], token_count_));
}

void Dataset::check_tokens() const {
  if (token_bytes_ == 1 && config_.model.vocabulary >= 256) return;
  for (std::uint64_t first = 0; first < token_count_; first += kPieceTokens) {
    const auto tokens = read_tokens(first, std::min(kPieceTokens, token_count_ - first));
    const auto beyond = std::ranges::find_if(
        tokens, [this](std::uint32_t token) { return token >= config_.model.vocabulary; });
    if (beyond == tokens.end()) continue;
    // The tokenizer of a text has no token beyond the vocabulary (settle_data_file()).
    const std::string remedy =
        !config_.text_file.empty()
            ? fmt::format("the file is damaged; remove it, and it is made again from \"{}\"",
                          config_.text_file)
        : *beyond < kVocabularyMax
            ? fmt::format("raise it to at least {}", *beyond + 1)
            : "no vocabulary is so large: the file has another data.format, or is damaged";
    fail(config_.data_file, fmt::format("token {} is {}, but model.vocabulary is {}; {}",
                                        first + static_cast<std::uint64_t>(beyond - tokens.begin()),
                                        *beyond, config_.model.vocabulary, remedy));
  }
}

// A read that fails because of the drive is repeated once, as the engine does with blocks.
void Dataset::read_bytes(std::uint64_t offset_bytes, std::span<unsigned char> bytes) const {
  std::uint32_t failures = 0;  // in a row
  while (!bytes.empty()) {
    const ssize_t got =
        ::pread(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset_bytes));
    if (got < 0) {
      const int error = errno;
      const ErrnoRule rule = errno_rule(IoKind::kRead, error);
      const std::uint32_t allowed = rule.action == ErrnoAction::kRetry    ? kRetriesMax
                                    : rule.action == ErrnoAction::kReread ? 1
                                                                          : 0;
      if (failures++ < allowed) continue;
      throw Error(ErrorCode::kIo,
                  fmt::format("read of data file \"{}\" [{}, +{}) failed{}: {}; {}",
                              config_.data_file, offset_bytes, bytes.size(),
                              allowed == 0 ? "" : fmt::format(" {} times", allowed + 1),
                              errno_text(error), rule.advice));
    }
    failures = 0;
    if (got == 0)
      fail(config_.data_file,
           fmt::format("it ends at byte {}, but had {} bytes at the start; it was cut meanwhile",
                       offset_bytes, file_bytes_));
    bytes = bytes.subspan(static_cast<std::size_t>(got));
    offset_bytes += static_cast<std::uint64_t>(got);
  }
}

std::vector<std::uint32_t> Dataset::read_tokens(std::uint64_t first, std::uint64_t count) const {
  std::vector<unsigned char> bytes(count * token_bytes_);
  read_bytes(header_bytes_ + first * token_bytes_, bytes);
  std::vector<std::uint32_t> tokens(count);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (std::uint32_t byte = 0; byte < token_bytes_; ++byte)
      tokens[i] |= std::uint32_t{bytes[i * token_bytes_ + byte]} << (8 * byte);
  }
  return tokens;
}

void Dataset::append_sequence(std::uint64_t begin, TokenBatch& batch) const {
  const std::vector<std::uint32_t> tokens =
      read_tokens(begin, std::uint64_t{config_.model.context} + 1);
  batch.tokens.insert(batch.tokens.end(), tokens.begin(), tokens.end() - 1);
  batch.targets.insert(batch.targets.end(), tokens.begin() + 1, tokens.end());
}

TokenBatch Dataset::training_batch(std::uint64_t step, std::uint32_t micro_batch) const {
  const gpt::CounterRandom random(config_.seed, "training data");
  const std::uint64_t starts =
      training_tokens_ - config_.model.context;  // a sequence and its successor fit behind each
  TokenBatch batch;
  for (std::uint32_t sequence = 0; sequence < config_.sequences; ++sequence) {
    const std::uint64_t draw =
        first_draw_ + ((step - first_step_) * micro_batches_ + micro_batch) * config_.sequences +
        sequence;
    append_sequence(random.bits(draw) % starts, batch);
  }
  return batch;
}

std::vector<TokenBatch> Dataset::validation_batches(std::uint64_t sequences) const {
  const std::uint64_t context = config_.model.context;
  const std::uint64_t sequences_there = (validation_tokens() - 1) / context;
  const std::uint64_t wanted = std::min(sequences_there, sequences);
  std::vector<TokenBatch> batches;
  for (std::uint64_t i = 0; i < wanted; ++i) {
    if (i % config_.sequences == 0) batches.emplace_back();
    append_sequence(training_tokens_ + i * sequences_there / wanted * context, batches.back());
  }
  return batches;
}

std::optional<double> Dataset::bigram_cross_entropy_until(
    const std::function<bool()>& is_asked, std::span<const TokenBatch> batches) const {
  // Only pairs of the batches: a long text has more than memory has room for.
  std::unordered_map<std::uint64_t, std::uint64_t> pairs;
  for (const TokenBatch& batch : batches)
    for (std::size_t i = 0; i < batch.tokens.size(); ++i)
      pairs.emplace(pair_of(batch.tokens[i], batch.targets[i]), 0);
  std::vector<std::uint64_t> firsts(config_.model.vocabulary, 0);
  for (std::uint64_t first = 0; first + 1 < training_tokens_; first += kPieceTokens) {
    if (is_asked()) return std::nullopt;
    // One more than a piece: its last token is the first of a pair, too.
    const auto tokens = read_tokens(first, std::min(kPieceTokens + 1, training_tokens_ - first));
    for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
      if (tokens[i] >= firsts.size())
        fail(
            config_.data_file,
            fmt::format("token {} is {}, but model.vocabulary is {}, and it was less at the start; "
                        "the file was changed meanwhile",
                        first + i, tokens[i], firsts.size()));
      ++firsts[tokens[i]];
      if (const auto pair = pairs.find(pair_of(tokens[i], tokens[i + 1])); pair != pairs.end())
        ++pair->second;
    }
  }
  double sum = 0;
  std::uint64_t count = 0;
  for (const TokenBatch& batch : batches) {
    for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
      const auto seen = static_cast<double>(pairs.at(pair_of(batch.tokens[i], batch.targets[i])));
      const auto total = static_cast<double>(firsts[batch.tokens[i]] + config_.model.vocabulary);
      sum -= std::log((seen + 1) / total);
    }
    count += batch.tokens.size();
  }
  return sum / static_cast<double>(count);
}

}  // namespace sluice
