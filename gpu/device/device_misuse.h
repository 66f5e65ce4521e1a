// These functions throw errors for calls that Device forbids. Every device reports such errors in
// the same words.
//
// Thread rule: any thread.
#pragma once

#include <string_view>

#include <sluice/device.h>

namespace sluice {

// Fails with kInvalidArgument if `is_met` is false. If `call` is "copy", the message is "copy:
// MESSAGE".
void require_argument(bool is_met, std::string_view call, std::string_view message);
// Fails with kInvalidArgument if the caller runs inside a function that was given to call_host().
void require_outside_host_function(std::string_view device);
[[noreturn]] void refuse_stream(std::string_view device, StreamId stream);
[[noreturn]] void refuse_event(std::string_view device, EventId event);

}  // namespace sluice
