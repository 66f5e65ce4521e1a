// A table that says what Sluice does when a transfer fails with an errno. The queues use the table
// to decide whether to repeat a transfer. The engine uses the table to decide whether to read a
// block again. Error messages end with the advice from this table. The function is pure, and any
// thread may call it.
#pragma once

#include <cstdint>

#include "io/io_queue.h"

namespace sluice {

// kReread is for errors that a second request may avoid. For example, a drive could not read a
// sector, or a link dropped a command.
enum class ErrnoAction : std::uint8_t {
  kRetry,   // nothing was moved; the queue tries again, at most kRetriesMax times in a row
  kReread,  // the request fails, but one new request may succeed
  kFail,    // the request fails, and a new request would fail, too
};

struct ErrnoRule {
  ErrnoAction action = ErrnoAction::kFail;
  const char* advice = "";  // ends a message: "check the drive with smartctl"
};

// Returns the rule for a transfer of `kind` that has failed with `error`, a positive errno.
//   errno                                reads        writes, flushes
//   EINTR, EAGAIN, ECANCELED             kRetry       kRetry
//   EIO, ENODATA, ENOLINK, ETIMEDOUT,
//     EREMOTEIO, EILSEQ, EBADMSG         kReread      kFail
//   everything else                      kFail        kFail
// Block drivers report an unreadable sector as ENODATA, and a lost path to the drive as ENOLINK.
// A write is not attempted again after EIO, because the state of the drive is unknown. A later
// successful read proves nothing about the write. A flush is not repeated either, because the
// kernel reports a lost page only once. A second flush would report success although the page is
// lost.
ErrnoRule errno_rule(IoKind kind, int error);

}  // namespace sluice
