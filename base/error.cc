#include <sluice/error.h>

#include <cstdio>
#include <cstdlib>
#include <system_error>

namespace sluice {

std::string_view name_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInternal: return "internal";
    case ErrorCode::kInvalidArgument: return "invalid argument";
    case ErrorCode::kConfig: return "config";
    case ErrorCode::kInput: return "input";
    case ErrorCode::kIo: return "i/o";
    case ErrorCode::kDamaged: return "damaged";
    case ErrorCode::kTimeout: return "timeout";
    case ErrorCode::kNoSpace: return "no space";
    case ErrorCode::kOutOfMemory: return "out of memory";
    case ErrorCode::kUnsupported: return "unsupported";
    case ErrorCode::kNonFinite: return "non-finite gradient";
    case ErrorCode::kRanks: return "ranks";
    case ErrorCode::kPoisoned: return "poisoned";
  }
  return "unknown";
}

std::string errno_text(int error_number) {
  return std::generic_category().message(error_number);
}

void check_failed(const char* expression, const char* file, int line, const char* message) {
  std::fprintf(stderr, "%s:%d: check failed: %s (%s)\n", file, line, expression, message);
  std::abort();
}

}  // namespace sluice
