// The only exception type of Sluice, and the check for programmer errors. The control plane, which
// constructs, configures and opens objects, throws Error. The data plane returns 0 or an errno and
// never throws across threads. A message says which operation failed, and on which object. The
// message also gives the numbers that matter, and a remedy that the user can try.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include <sluice/export.h>

namespace sluice {

enum class ErrorCode {
  kInternal,         // a broken invariant inside Sluice
  kInvalidArgument,  // a call that breaks the function's contract
  kConfig,           // the config file, the command line, or a value in them
  kInput,            // a file of the user is missing, unreadable or of the wrong kind
  kIo,               // a transfer failed; the message names file, range and errno
  kDamaged,          // storage returned wrong bytes; the message names the block
  kTimeout,          // storage has not answered in time; requests are still in flight
  kNoSpace,          // a storage path cannot hold what the layout needs
  kOutOfMemory,      // a tier's budget or the machine's memory is too small
  kUnsupported,      // this machine or build lacks a feature that was requested by name
  kNonFinite,        // a gradient is NaN or infinite, and the policy is "stop"
  kRanks,            // another rank has failed, has stopped answering, or disagrees
  kPoisoned,         // an earlier failure left the engine's state inconsistent
};

SLUICE_EXPORT std::string_view name_of(ErrorCode code);

class SLUICE_EXPORT Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

// Returns the text of an errno, such as "Input/output error" for 5. Thread-safe, unlike strerror.
SLUICE_EXPORT std::string errno_text(int error_number);

// Prints the place and the message to stderr and aborts, because no state is worth keeping after a
// programmer error.
[[noreturn]] SLUICE_EXPORT void check_failed(const char* expression, const char* file, int line,
                                             const char* message);

}  // namespace sluice

// The check is active in every build. `message` is a string literal that states the contract.
#define SLUICE_CHECK(condition, message)                               \
  do {                                                                 \
    if (!(condition)) [[unlikely]]                                     \
      ::sluice::check_failed(#condition, __FILE__, __LINE__, message); \
  } while (false)
