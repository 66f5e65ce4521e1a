#include "tools/gpt/train/trainer.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "tools/gpt/train/stream_guard.h"

namespace sluice {

std::optional<double> Trainer::mean_loss(const Evaluation& evaluation, const StopRequest& stop,
                                         std::span<const TokenBatch> batches,
                                         const ForwardGroup& forward) {
  Device& device = evaluation.device;
  const Stream& stream = evaluation.stream;
  const auto batch_count = static_cast<double>(batches.size());
  double loss = 0;
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
        forward(lease, use, group, loss);
      }
      device.record(event, stream.id());
    }
    batches = batches.subspan(group.size());
  }
  device.synchronize(stream.id());
  if (evaluation.settle) evaluation.settle(loss);
  if (stop.is_agreed()) return std::nullopt;  // computation may have left something out
  return loss / batch_count;
}

}  // namespace sluice
