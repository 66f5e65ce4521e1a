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
