// What an errno of a transfer leads to, for all of Sluice in one table: the queues ask it whether
// to attempt a transfer again, the engine whether to read a block again, and messages take the
// advice. Pure; any thread.
#pragma once

#include <cstdint>

#include "io/io_queue.h"

namespace sluice {

enum class ErrnoAction : std::uint8_t {
  kRetry,   // the queue attempts the same again, kRetriesMax times in a row: nothing was moved
  kReread,  // the request fails; a whole new one may succeed, once: a drive that could not read a
            // sector, or a link that dropped a command
  kFail,    // the request fails, and would again
};

struct ErrnoRule {
  ErrnoAction action = ErrnoAction::kFail;
  const char* advice = "";  // "check the drive with smartctl": the end of a message
};

// The rule for `error` (positive) of a transfer of `kind`.
//   errno                                reads        writes, flushes
//   EINTR, EAGAIN, ECANCELED             kRetry       kRetry
//   EIO, ETIMEDOUT, EILSEQ, EREMOTEIO,
//     EBADMSG                            kReread      kFail
//   everything else                      kFail        kFail
// A write is not attempted again after EIO: what the drive holds is unknown then, and a later read
// that succeeds would prove nothing. Likewise a flush: the kernel reports a lost page once, and the
// next flush would succeed without it.
ErrnoRule errno_rule(IoKind kind, int error);

}  // namespace sluice
