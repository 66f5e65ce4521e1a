#include "tools/gpt/train/trainer.h"

#include <array>
#include <cstddef>

#include "tools/gpt/train/stream_guard.h"

namespace sluice {

double Trainer::mean_loss(Engine& engine, Device& device, const Stream& stream,
                          std::span<const TokenBatch> batches, const ForwardBatch& forward) {
  double loss = 0;
  const std::array<Event, 2> computed{Event(device), Event(device)};
  const StreamGuard guard(device, stream);
  Inference inference = engine.begin_inference();
  for (std::size_t batch = 0; batch < batches.size(); ++batch) {
    // The next batch is read ahead; work for more of them would only fill the stream's queue.
    const EventId event = computed[batch % computed.size()].id();
    device.synchronize(event);
    forward(inference, batches[batch], loss);
    device.record(event, stream.id());
  }
  device.synchronize(stream.id());
  return loss / static_cast<double>(batches.size());
}

}  // namespace sluice
