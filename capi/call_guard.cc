#include "capi/call_guard.h"

#include "capi/thread_text.h"

namespace sluice {

sluice_status set_error(sluice_status status, const char* message) noexcept {
  try {
    (void)keep_text(ThreadText::kLastError, message);
  } catch (const std::bad_alloc&) {
    // Without memory the message is empty; the status says what happened.
  }
  return status;
}

sluice_status refuse_forked(const char* noun) noexcept {
  try {
    const std::string kind = noun;
    return set_error(SLUICE_FORKED,
                     ("this " + kind + " belongs to the process that forked this one; make a new " +
                      kind + " here, or use this one only in the parent")
                         .c_str());
  } catch (const std::bad_alloc&) {
    return set_error(SLUICE_FORKED, "forked");
  }
}

const char* last_error_text() noexcept {
  return kept_text(ThreadText::kLastError);
}

void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void require(const void* pointer, const char* call, const char* name) {
  if (pointer == nullptr) refuse(std::string(call) + ": " + name + " is null");
}

}  // namespace sluice
