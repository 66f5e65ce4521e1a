#include "tools/dataset.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <unordered_map>

#include <fmt/format.h>

#include "base/error.h"
#include "base/unique_fd.h"
#include "tools/gpt/counter_random.h"

namespace sluice {
namespace {

// llm.c's token files: 256 32-bit words, of which the first is a magic number, the second the
// version and the third the number of tokens; then uint16 tokens.
constexpr std::uint32_t kHeaderBytes = 1024;
constexpr std::uint32_t kHeaderMagic = 20240520;

[[noreturn]] void fail(const std::string& file, const std::string& why) {
  throw Error(ErrorCode::kInput, fmt::format("data file \"{}\": {}", file, why));
}

}  // namespace

Dataset::Dataset(const TrainConfig& config) : config_(config) {
  if (config_.data_file.empty())
    throw Error(ErrorCode::kConfig,
                "no data file is given; set data.file in the config or pass --data FILE");
  map_file();
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

Dataset::~Dataset() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapping_bytes_);
}

void Dataset::map_file() {
  const UniqueFd file(::open(config_.data_file.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0)
    fail(config_.data_file, "cannot open it: " + errno_text(errno));
  if (!S_ISREG(status.st_mode)) fail(config_.data_file, "it is not a regular file");
  if (status.st_size == 0) fail(config_.data_file, "it is empty");
  mapping_bytes_ = static_cast<std::uint64_t>(status.st_size);
  void* mapping = ::mmap(nullptr, mapping_bytes_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (mapping == MAP_FAILED) fail(config_.data_file, "cannot map it: " + errno_text(errno));
  mapping_ = mapping;
}

void Dataset::detect_format() {
  tokens_ = static_cast<const unsigned char*>(mapping_);
  token_count_ = mapping_bytes_;
  std::uint32_t header[3] = {};
  if (mapping_bytes_ >= kHeaderBytes) std::memcpy(header, mapping_, sizeof header);
  const bool has_header = header[0] == kHeaderMagic && header[1] == 1;
  if (config_.data_format == TokenFormat::kBytes ||
      (config_.data_format == TokenFormat::kAuto && !has_header))
    return;
  token_bytes_ = 2;
  const std::uint64_t header_bytes = has_header ? kHeaderBytes : 0;
  tokens_ += header_bytes;
  token_count_ = (mapping_bytes_ - header_bytes) / 2;
  if ((mapping_bytes_ - header_bytes) % 2 != 0)
    fail(config_.data_file, fmt::format("its {} bytes are no whole number of uint16 tokens",
                                        mapping_bytes_ - header_bytes));
  if (has_header && header[2] != token_count_)
    fail(config_.data_file,
         fmt::format("its header promises {} tokens, but {} follow; it is cut or damaged",
                     header[2], token_count_));
}

void Dataset::check_tokens() const {
  for (std::uint64_t i = 0; i < token_count_; ++i) {
    if (token(i) >= config_.model.vocabulary)
      fail(config_.data_file,
           fmt::format("token {} is {}, but model.vocabulary is {}; raise it to at least {}", i,
                       token(i), config_.model.vocabulary, token(i) + 1));
  }
}

std::uint32_t Dataset::token(std::uint64_t index) const {
  if (token_bytes_ == 1) return tokens_[index];
  return static_cast<std::uint32_t>(tokens_[2 * index] | (tokens_[2 * index + 1] << 8));
}

void Dataset::append_sequence(std::uint64_t begin, TokenBatch& batch) const {
  for (std::uint64_t i = begin; i < begin + config_.model.context; ++i) {
    batch.tokens.push_back(token(i));
    batch.targets.push_back(token(i + 1));
  }
}

TokenBatch Dataset::training_batch(std::uint64_t step, std::uint32_t micro_batch) const {
  const gpt::CounterRandom random(config_.seed, "training data");
  const std::uint64_t starts =
      training_tokens_ - config_.model.context;  // a sequence and its successor fit behind each
  TokenBatch batch;
  for (std::uint32_t sequence = 0; sequence < config_.sequences; ++sequence) {
    const std::uint64_t draw =
        (step * config_.micro_batches + micro_batch) * config_.sequences + sequence;
    append_sequence(random.bits(draw) % starts, batch);
  }
  return batch;
}

std::vector<TokenBatch> Dataset::validation_batches(std::uint32_t count) const {
  const std::uint64_t context = config_.model.context;
  const std::uint64_t sequences_there = (validation_tokens() - 1) / context;
  const std::uint64_t wanted = std::min(sequences_there, std::uint64_t{count} * config_.sequences);
  std::vector<TokenBatch> batches;
  for (std::uint64_t i = 0; i < wanted; ++i) {
    // The last batch is filled up with its own sequences again when the part is too short, so that
    // all have one size.
    if (i % config_.sequences == 0) batches.emplace_back();
    append_sequence(training_tokens_ + i * sequences_there / wanted * context, batches.back());
  }
  TokenBatch& last = batches.back();
  const std::uint64_t whole = std::uint64_t{config_.sequences} * context;
  for (std::uint64_t i = 0; last.tokens.size() < whole; ++i) {
    last.tokens.push_back(last.tokens[i]);
    last.targets.push_back(last.targets[i]);
  }
  return batches;
}

double Dataset::bigram_cross_entropy(std::span<const TokenBatch> batches) const {
  std::unordered_map<std::uint32_t, std::uint64_t> pairs;
  std::vector<std::uint64_t> firsts(config_.model.vocabulary, 0);
  for (std::uint64_t i = 0; i + 1 < training_tokens_; ++i) {
    ++pairs[token(i) << 16 | token(i + 1)];
    ++firsts[token(i)];
  }
  double sum = 0;
  std::uint64_t count = 0;
  for (const TokenBatch& batch : batches) {
    for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
      const auto pair = pairs.find(batch.tokens[i] << 16 | batch.targets[i]);
      const auto seen = static_cast<double>(pair == pairs.end() ? 0 : pair->second);
      const auto total = static_cast<double>(firsts[batch.tokens[i]] + config_.model.vocabulary);
      sum -= std::log((seen + 1) / total);
    }
    count += batch.tokens.size();
  }
  return sum / static_cast<double>(count);
}

}  // namespace sluice
