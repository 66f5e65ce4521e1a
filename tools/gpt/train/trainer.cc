#include "tools/gpt/train/trainer.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include <sluice/error.h>
#include "tools/gpt/train/stream_guard.h"

namespace sluice {
namespace {

// The mean over all tokens. A batch as large as the first weighs 1, so that the mean of batches of
// one size has no other rounding than a sum and a division.
double mean_of(std::span<const double> losses, std::span<const TokenBatch> batches) {
  SLUICE_CHECK(losses.size() == batches.size(), "each batch has a loss");
  const auto whole = static_cast<double>(batches.front().tokens.size());
  double sum = 0;
  double weights = 0;
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const double weight = static_cast<double>(batches[i].tokens.size()) / whole;
    sum += weight * losses[i];
    weights += weight;
  }
  return sum / weights;
}

}  // namespace

std::optional<double> Trainer::mean_loss(const Evaluation& evaluation, const StopRequest& stop,
                                         std::span<const TokenBatch> batches,
                                         const ForwardGroup& forward) {
  const std::span<const TokenBatch> all = batches;
  Device& device = evaluation.device;
  const Stream& stream = evaluation.stream;
  std::vector<double> losses;
  const std::array<Event, 2> computed{Event(device), Event(device)};
  std::size_t uses = 0;
  const StreamGuard guard(device, stream);
  Inference inference = evaluation.engine.begin_inference();
  while (!batches.empty()) {
    const auto group =
        batches.first(std::min<std::size_t>(batches.size(), evaluation.batches_at_once));
    for (std::uint32_t use = 0; use < evaluation.forward_order.size(); ++use, ++uses) {
      // Units are read ahead without this; work for more uses would only fill the stream's queue,
      // and a request to stop would come behind it.
      const EventId event = computed[uses % computed.size()].id();
      device.synchronize(event);
      if (stop.is_agreed()) return std::nullopt;
      {
        const Lease lease = inference.acquire(evaluation.forward_order[use], stream);
        forward(lease, use, group, losses);
      }
      device.record(event, stream.id());
    }
    batches = batches.subspan(group.size());
  }
  device.synchronize(stream.id());
  if (evaluation.settle) evaluation.settle(losses);
  if (stop.is_agreed()) return std::nullopt;  // computation may have left something out
  return mean_of(losses, all);
}

}  // namespace sluice
