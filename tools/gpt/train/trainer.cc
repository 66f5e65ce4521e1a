#include "tools/gpt/train/trainer.h"

#include "tools/gpt/train/stream_guard.h"

namespace sluice {

double Trainer::mean_loss(Engine& engine, Device& device, const Stream& stream,
                          std::span<const TokenBatch> batches, const ForwardBatch& forward) {
  double loss = 0;
  const StreamGuard guard(device, stream);
  for (const TokenBatch& batch : batches) {
    Inference inference = engine.begin_inference();
    forward(inference, batch, loss);
    device.synchronize(stream.id());
  }
  return loss / static_cast<double>(batches.size());
}

}  // namespace sluice
