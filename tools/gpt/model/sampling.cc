#include "tools/gpt/model/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include <sluice/error.h>
#include "tools/gpt/model/counter_random.h"

namespace sluice::gpt {

std::uint32_t sample_token(std::span<const float> logits, const SamplingOptions& options,
                           std::uint64_t position) {
  SLUICE_CHECK(!logits.empty() && options.temperature >= 0, "logits and a temperature >= 0");
  std::vector<std::uint32_t> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), 0u);
  const auto more_probable = [&](std::uint32_t a, std::uint32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  const std::size_t kept = options.temperature == 0 ? 1
                           : options.top_k == 0
                               ? tokens.size()
                               : std::min<std::size_t>(options.top_k, tokens.size());
  std::partial_sort(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(kept),
                    tokens.end(), more_probable);
  if (kept == 1) return tokens[0];

  const double largest = logits[tokens[0]];
  std::vector<double> cumulative(kept);
  double total = 0;
  for (std::size_t i = 0; i < kept; ++i)
    cumulative[i] = total += std::exp((logits[tokens[i]] - largest) / options.temperature);
  const double drawn = CounterRandom(options.seed, "sampling").uniform(position) * total;
  const auto chosen = std::upper_bound(cumulative.begin(), cumulative.end(), drawn);
  const auto index =
      std::min<std::ptrdiff_t>(chosen - cumulative.begin(), static_cast<std::ptrdiff_t>(kept) - 1);
  return tokens[static_cast<std::size_t>(index)];
}

}  // namespace sluice::gpt
