#include "tools/gpt/train/tokenized_data.h"

#include <fmt/format.h>

#include <sluice/error.h>
#include "tools/gpt/text/token_file.h"
#include "tools/gpt/text/tokenizer.h"

namespace sluice {

void settle_data_file(TrainConfig& config, bool is_quiet) {
  if (config.tokenizer.empty() || config.data_file.empty()) return;
  if (config.data_format == TokenFormat::kBytes)
    throw Error(ErrorCode::kConfig,
                fmt::format("data.format is \"bytes\", one token per byte, but data.tokenizer is "
                            "\"{}\"; leave one of them out",
                            config.tokenizer));
  Tokenizer tokenizer(config.tokenizer);
  if (tokenizer.token_count() > config.model.vocabulary)
    throw Error(ErrorCode::kConfig,
                fmt::format("tokenizer \"{}\" has {} tokens, but model.vocabulary is {}; raise it "
                            "to at least {}",
                            tokenizer.path(), tokenizer.token_count(), config.model.vocabulary,
                            tokenizer.token_count()));
  const bool has_tokens =
      config.data_format != TokenFormat::kAuto || has_token_header(config.data_file);
  if (has_tokens && is_of_other_tokenizer(config.data_file, tokenizer))
    throw Error(
        ErrorCode::kInput,
        fmt::format("the token file \"{}\" was made with another tokenizer than \"{}\"; pass "
                    "that one, or the text in place of its tokens",
                    config.data_file, tokenizer.path()));
  if (has_tokens) return;
  config.text_file = config.data_file;
  config.data_file = token_file_beside(config.text_file, tokenizer, is_quiet);
}

}  // namespace sluice
