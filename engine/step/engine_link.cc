#include "engine/step/engine_link.h"

#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/flow/activation_flow.h"
#include "engine/step/step_loop.h"

namespace sluice {

void EngineLink::abandon(std::uint64_t number) noexcept {
  if (!is_open(number)) return;
  activations->abandon();
  loop->abandon();
  ++walk;
}

void EngineLink::cut() noexcept {
  loop = nullptr;
  activations = nullptr;
  layout = nullptr;
  device = nullptr;
}

void EngineLink::require_stream(const char* name, const Stream& stream) const {
  if (stream.device() == device) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: the stream {}; give a Stream of the device \"{}\" that the engine "
                          "was made with",
                          name, stream.device() == nullptr ? "is empty" : "is of another device",
                          device->name()));
}

CallGuard::CallGuard(std::shared_ptr<EngineLink> link, const char* name) : link_(std::move(link)) {
  const char* other = nullptr;
  if (link_ == nullptr || link_->call.compare_exchange_strong(other, name)) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: the engine is inside {}, called by another thread or by a function "
                          "given to it; let that call return first",
                          name, other));
}

}  // namespace sluice
