#include "tools/gpt/model/gpt_config.h"

#include <fmt/core.h>

#include <sluice/error.h>

namespace sluice::gpt {
namespace {

struct Limit {
  const char* key;
  std::uint32_t value;
  std::uint32_t max;
};

}  // namespace

void validate(const GptConfig& config) {
  // The limits keep every product of extents that the compute code forms within 63 bits, and every
  // extent within the 32-bit integers of BLAS.
  const Limit limits[] = {{"model.layers", config.layers, 10'000},
                          {"model.heads", config.heads, 1'024},
                          {"model.embedding", config.embedding, 65'536},
                          {"model.context", config.context, 1u << 20},
                          {"model.vocabulary", config.vocabulary, 1u << 24}};
  for (const Limit& limit : limits) {
    if (limit.value == 0 || limit.value > limit.max)
      throw Error(ErrorCode::kConfig, fmt::format("{} is {}; it must be between 1 and {}",
                                                  limit.key, limit.value, limit.max));
  }
  if (config.embedding % config.heads != 0) {
    const std::uint32_t nearest = (config.embedding / config.heads + 1) * config.heads;
    throw Error(ErrorCode::kConfig,
                fmt::format("model.embedding is {}, which model.heads = {} does not divide; use a "
                            "multiple such as {}, or another number of heads",
                            config.embedding, config.heads, nearest));
  }
}

}  // namespace sluice::gpt
