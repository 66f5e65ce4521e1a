// The exit codes of the sluice command. Scripts rely on these numbers (docs/cli.md).
#pragma once

#include <sluice/error.h>

namespace sluice {

inline constexpr int kExitOk = 0;
inline constexpr int kExitInternal = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitRegression = 3;
inline constexpr int kExitResource = 5;
inline constexpr int kExitInterrupted = 130;

inline int exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kConfig:
    case ErrorCode::kInput:
    case ErrorCode::kInvalidArgument: return kExitUsage;
    case ErrorCode::kNoSpace:
    case ErrorCode::kOutOfMemory:
    case ErrorCode::kUnsupported: return kExitResource;
    case ErrorCode::kInternal:
    case ErrorCode::kIo:
    case ErrorCode::kDamaged:
    case ErrorCode::kTimeout:
    case ErrorCode::kNonFinite:
    case ErrorCode::kRanks:
    case ErrorCode::kPoisoned: return kExitInternal;
  }
  return kExitInternal;
}

}  // namespace sluice
