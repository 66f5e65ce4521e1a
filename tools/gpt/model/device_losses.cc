#include "tools/gpt/model/device_losses.h"

#include <utility>

namespace sluice::gpt {

DeviceLosses::DeviceLosses(Device& device)
    : device_(device),
      places_(kPlaces * sizeof(double), "losses on their way from the device"),
      copied_(device) {
  device_.register_host_memory(places_.span());
}

DeviceLosses::~DeviceLosses() {
  device_.unregister_host_memory(places_.span());
}

void DeviceLosses::keep(const double* loss, StreamId stream) {
  if (count_ == kPlaces) {
    device_.synchronize(copied_.id());
    collect();
  }
  device_.copy(places_.data() + count_++ * sizeof(double), reinterpret_cast<const std::byte*>(loss),
               sizeof(double), stream);
  device_.record(copied_.id(), stream);
}

std::vector<double> DeviceLosses::take(StreamId stream) {
  device_.synchronize(stream);
  collect();
  return std::exchange(collected_, {});
}

void DeviceLosses::drop() {
  count_ = 0;
  collected_.clear();
}

void DeviceLosses::collect() {
  const auto* const first = reinterpret_cast<const double*>(places_.data());
  collected_.insert(collected_.end(), first, first + std::exchange(count_, 0u));
}

}  // namespace sluice::gpt
