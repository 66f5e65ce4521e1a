// How Sluice answers an errno of a transfer, in one table for all: the queues ask it whether to
// attempt a transfer again, the engine asks whether to read a block again, and messages take the
// advice. Pure; any thread.
#pragma once

#include <cstdint>

#include "io/io_queue.h"

namespace sluice {

enum class ErrnoAction : std::uint8_t {
  kRetry,   // the queue attempts the same again, kRetriesMax times in a row: nothing was moved
  kReread,  // the request fails; a whole new one may succeed, once: a drive that could not read a
            // sector, or a link that dropped a command
  kFail,    // the request fails, and would fail again
};

struct ErrnoRule {
  ErrnoAction action = ErrnoAction::kFail;
  const char* advice = "";  // "check the drive with smartctl": ends a message
};

// The rule for `error` (positive) of a transfer of `kind`.
//   errno                                reads        writes, flushes
//   EINTR, EAGAIN, ECANCELED             kRetry       kRetry
//   EIO, ETIMEDOUT, EILSEQ, EREMOTEIO,
//     EBADMSG                            kReread      kFail
//   everything else                      kFail        kFail
// A write is not attempted again after EIO: the state of the drive is unknown then, and a later
// read that succeeds would prove nothing. The same holds for a flush: the kernel reports a lost
// page once, and the next flush would succeed without that page.
ErrnoRule errno_rule(IoKind kind, int error);

}  // namespace sluice
