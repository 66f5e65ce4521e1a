// This code wraps every call of the C interface. The code turns exceptions into a status and a
// message. The code also ensures that only one thread at a time uses a handle. Only the process
// that made the handle may use it.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <new>
#include <string>

#include <sluice/error.h>
#include "base/float_environment.h"

#include "capi/sluice.h"

namespace sluice {

// The members that the handles of engines, optimizers and ranks have in common. Each kind of handle
// also has kNoun, its name in messages.
struct Handle {
  const pid_t owner = getpid();
  std::atomic<bool> is_in_a_call = false;

  bool is_mine() const { return owner == getpid(); }
};

// Sets the error message of the calling thread, and returns `status`.
sluice_status set_error(sluice_status status, const char* message) noexcept;
const char* last_error_text() noexcept;

[[noreturn]] void refuse(const std::string& message);
// Fails with kInvalidArgument if the pointer is null.
void require(const void* pointer, const char* call, const char* name);

struct CallbackFailed : std::exception {
  const char* call = "sluice_initialize";  // the C function that the application has called

  const char* what() const noexcept override { return "the function for values has failed"; }
};

// Sets the error message for a handle of another process.
sluice_status refuse_forked(const char* noun) noexcept;

// Runs `call` and turns an exception from `call` into a status. `call` runs in the floating-point
// environment of base/float_environment.h. The caller's own environment does not change.
template <typename Call>
sluice_status guarded(const Call& call) noexcept {
  const FloatEnvironment environment;
  try {
    call();
    return SLUICE_OK;
  } catch (const Error& error) {
    return set_error(static_cast<sluice_status>(static_cast<int>(error.code()) + 1), error.what());
  } catch (const CallbackFailed& failure) {
    return set_error(SLUICE_CALLBACK, (std::string(failure.call) + ": " + failure.what()).c_str());
  } catch (const std::bad_alloc&) {
    return set_error(SLUICE_OUT_OF_MEMORY, "the process is out of memory");
  } catch (const std::exception& error) {
    return set_error(SLUICE_INTERNAL, error.what());
  } catch (...) {
    return set_error(SLUICE_INTERNAL, "something other than an exception was thrown");
  }
}

// Runs the call `name` on `handle` and turns an exception into a status. The call is refused if
// another thread is inside a call on `handle`, or if another process made `handle`. If another
// process made the handle, the guard reads only Handle::owner, because the threads and pools of the
// handle do not exist in this process.
template <typename Kind, typename Call>
sluice_status guarded(Kind* handle, const char* name, const Call& call) noexcept {
  if (handle != nullptr && !handle->is_mine()) return refuse_forked(Kind::kNoun);
  return guarded([&] {
    require(handle, name, (std::string("the ") + Kind::kNoun).c_str());
    if (handle->is_in_a_call.exchange(true))
      refuse(std::string(name) + ": another call of this " + Kind::kNoun +
             " has not returned; one thread at a time may use it");
    struct Leave {
      Handle& handle;
      ~Leave() { handle.is_in_a_call = false; }
    } leave{*handle};
    try {
      call(name);
    } catch (CallbackFailed& failure) {
      failure.call = name;
      throw;
    }
  });
}

// Deletes `handle`, if this process made the handle. If a thread is inside a call on the handle,
// the handle stays: without it, the call would use freed memory, or never return.
template <typename Kind>
void destroy(Kind* handle) noexcept {
  if (handle == nullptr || !handle->is_mine() || handle->is_in_a_call.exchange(true)) return;
  delete handle;
}

}  // namespace sluice
