// These functions make files durable, and detect errors that a file system reports late. A write
// only puts bytes into the page cache. The drive, the quota or the server may still refuse those
// bytes later. This header also maps the errno of a file operation to an error code and a remedy.
//
// Thread rule: any thread.
#pragma once

#include <string>

#include <sluice/error.h>

namespace sluice {

// Makes all bytes that were written through `descriptor` durable. Returns 0 or an errno. The result
// is also 0 if the file system has no fsync (EINVAL, ENOTSUP). `descriptor` stays open.
int flush_file(int descriptor);

// Closes a duplicate of `descriptor`. Returns the errno if close() fails, and 0 otherwise. A
// network file system (NFS, FUSE) writes a file's bytes whenever a descriptor of the file is
// closed. If a network file system could not store the bytes, close() reports an error.
// `descriptor` stays open, and keeps its locks. No duplicate can be made if the process has reached
// its limit of open files. In that case, the result is 0, because flush_file() has already flushed
// the bytes.
int closing_error(int descriptor);

// Makes the names in `folder` durable. Returns 0 or an errno, as flush_file() does. The kernel
// cannot sync a folder that may be written but not read (a drop box). The result for such a folder
// is also 0.
int flush_folder(const std::string& folder);

// Returns the error code for `error`, which is the errno of a file operation. The error code is
// kNoSpace, kUnsupported or kIo. If none of these codes fits `error`, the result is `otherwise`.
ErrorCode file_error_code(int error, ErrorCode otherwise);

// Returns the remedy for `error`. An error message ends with this text. An example is "free space
// there, or name a file on another disk".
const char* file_remedy(int error);

}  // namespace sluice
