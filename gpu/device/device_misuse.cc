#include "gpu/device/device_misuse.h"

#include <cstdint>

#include <fmt/format.h>

#include <sluice/error.h>
#include "gpu/device/host_stream.h"

namespace sluice {
namespace {

[[noreturn]] void refuse_object(std::string_view device, std::string_view kind, std::uint32_t id) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} {} does not exist on the device \"{}\"; it is empty, of another "
                          "device, or destroyed: give one that this device has made",
                          kind, id, device));
}

}  // namespace

void require_argument(bool is_met, std::string_view call, std::string_view message) {
  if (!is_met) throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: {}", call, message));
}

void require_outside_host_function(std::string_view device) {
  if (!is_in_host_function()) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("a function given to call_host() of the device \"{}\" calls the device; "
                          "call it after the function, from another thread",
                          device));
}

void refuse_stream(std::string_view device, StreamId stream) {
  refuse_object(device, "stream", static_cast<std::uint32_t>(stream));
}

void refuse_event(std::string_view device, EventId event) {
  refuse_object(device, "event", static_cast<std::uint32_t>(event));
}

}  // namespace sluice
