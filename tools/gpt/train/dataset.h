// A text file or token file that provides training data and validation data. The file is read piece
// by piece, and is not mapped into memory. A mapped file would count as memory that the process
// uses. If a mapped file were truncated, SIGBUS would end the process. The last part of the file is
// for validation. The sequences of a step depend only on (seed, step, micro-batch). A Dataset is
// constant after construction, and any thread may call it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

// One micro-batch. A micro-batch has sequences x context tokens. A batch for validation may have
// fewer sequences. The target of a token is the next token of the text.
struct TokenBatch {
  std::vector<std::uint32_t> tokens;
  std::vector<std::uint32_t> targets;
};

class Dataset {
 public:
  // Fails with:
  // - kInput: the file is missing, unreadable or empty, or has tokens beyond the vocabulary.
  // - kInput: the file is too short. Training and validation each need one sequence and the token
  //   that follows the sequence.
  // - kConfig: no file is given.
  explicit Dataset(const TrainConfig& config, std::uint32_t rank_count = 1);

  std::uint64_t token_count() const { return token_count_; }
  std::uint64_t training_tokens() const { return training_tokens_; }
  std::uint64_t validation_tokens() const { return token_count_ - training_tokens_; }

  // From `step` on, the run's sequences continue behind the first `draws` ones. The runs before
  // this one may have had other batches. Without a call, step 0 begins with the first sequence.
  void go_on(std::uint64_t step, std::uint64_t draws) {
    first_step_ = step;
    first_draw_ = draws;
  }

  // Returns one micro-batch of a step, from the step of go_on() on. Each rank has its own
  // micro-batches. `micro_batch` is the number of the micro-batch within the step, counted over all
  // ranks.
  // Fails with kInput if the file has become shorter since the constructor read it.
  TokenBatch training_batch(std::uint64_t step, std::uint32_t micro_batch) const;

  // Returns batches of `sequences` different sequences, spread evenly over the validation part. If
  // the validation part is too short for them, the result has all sequences that are there. Which
  // ones does not depend on the size of a batch; the last batch may have fewer than the others.
  // Requires: `sequences` is not 0.
  std::vector<TokenBatch> validation_batches(std::uint64_t sequences) const;

  // The mean cross-entropy of `batches` under a bigram model, in nats per token. The bigram model
  // counts the pairs of tokens in the training part, with add-one smoothing. A model that has
  // learned more than pairs of tokens must reach a lower cross-entropy.
  double bigram_cross_entropy(std::span<const TokenBatch> batches) const {
    return *bigram_cross_entropy_until([] { return false; }, batches);
  }
  // Returns the result of bigram_cross_entropy(). The call reads the whole training part, and calls
  // `is_asked` before each piece of 2^20 tokens. If `is_asked` returns true, the call ends and
  // returns nothing. The call needs memory for the pairs of `batches` and one piece.
  std::optional<double> bigram_cross_entropy_until(const std::function<bool()>& is_asked,
                                                   std::span<const TokenBatch> batches) const;

 private:
  void open_file();
  void detect_format();
  void check_tokens() const;
  void read_bytes(std::uint64_t offset_bytes, std::span<unsigned char> bytes) const;
  std::vector<std::uint32_t> read_tokens(std::uint64_t first, std::uint64_t count) const;
  void append_sequence(std::uint64_t begin, TokenBatch& batch) const;

  // Constant after construction.
  TrainConfig config_;
  std::uint64_t micro_batches_;  // of a step, over all ranks
  UniqueFd file_;
  std::uint64_t file_bytes_ = 0;
  std::uint64_t header_bytes_ = 0;
  std::uint32_t token_bytes_ = 1;
  std::uint64_t token_count_ = 0;
  std::uint64_t training_tokens_ = 0;

  std::uint64_t first_step_ = 0;
  std::uint64_t first_draw_ = 0;
};

}  // namespace sluice
