#include "capi/call_guard.h"

namespace sluice {
namespace {

thread_local std::string last_error;

}  // namespace

sluice_status set_error(sluice_status status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (const std::bad_alloc&) {
    last_error.clear();
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
  return last_error.c_str();
}

void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void require(const void* pointer, const char* call, const char* name) {
  if (pointer == nullptr) refuse(std::string(call) + ": " + name + " is null");
}

}  // namespace sluice
