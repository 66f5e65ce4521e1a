#include "io/errno_action.h"

#include <cerrno>

namespace sluice {

ErrnoRule errno_rule(IoKind kind, int error) {
  const ErrnoAction medium = kind == IoKind::kRead ? ErrnoAction::kReread : ErrnoAction::kFail;
  switch (error) {
    case EINTR:
    case EAGAIN:
    case ECANCELED:
      return {ErrnoAction::kRetry, "the kernel gave up again and again; check dmesg and the load"};
    case EIO:
    case ENODATA:
    case ENOLINK:
    case ETIMEDOUT:
    case EREMOTEIO: return {medium, "check the drive (smartctl, dmesg) and its cable"};
    case EILSEQ:
    case EBADMSG: return {medium, "the drive's own check found damage; replace it (smartctl)"};
    case ENOSPC:
    case EDQUOT:
      return {ErrnoAction::kFail,
              "the file was allocated in full, so the file system or a thin volume below it has "
              "run out; free space there, or name another path in storage.paths"};
    case EFBIG: return {ErrnoAction::kFail, "raise the limit of file size (ulimit -f)"};
    case EMFILE:
    case ENFILE: return {ErrnoAction::kFail, "raise the limit of open files (ulimit -n)"};
    case EROFS: return {ErrnoAction::kFail, "the file system went read-only; check dmesg"};
    case EINVAL:
      return {ErrnoAction::kFail, "the file system refuses O_DIRECT; name another storage path"};
    case ENOMEM:
    case ENOBUFS: return {ErrnoAction::kFail, "the kernel is short of memory; lower queue_depth"};
    case ENXIO:
    case ENODEV:
    case ESTALE: return {ErrnoAction::kFail, "the drive or the mount has gone; check dmesg"};
    default: return {ErrnoAction::kFail, "check the drive"};
  }
}

}  // namespace sluice
