// Makes files durable, with the errors that a file system reports late. A write only puts bytes
// into memory. The drive, the quota or the server may still refuse the bytes afterwards. This
// header also gives the error code and the remedy for an errno of a file.
//
// Thread rule: any thread.
#pragma once

#include <string>

#include <sluice/error.h>

namespace sluice {

// Makes all bytes that were written through `descriptor` durable. Returns 0 or an errno. Returns 0
// where the file system has no fsync (EINVAL, ENOTSUP). `descriptor` stays open.
int flush_file(int descriptor);

// Closes a duplicate of `descriptor`, and returns 0 or the errno of that close. Network file
// systems (NFS, FUSE) write at every close, and report there that the bytes could not be stored.
// `descriptor` stays open, with its locks. If the process may open no more files, the result is 0,
// because flush_file() has already flushed the bytes.
int closing_error(int descriptor);

// Makes the names in `folder` durable. The result is the same as for flush_file(). The result is
// also 0 for a folder that may be written but not read (a drop box), because such a folder cannot
// be synced.
int flush_folder(const std::string& folder);

// The error code for `error`, an errno of a file: kNoSpace, kUnsupported or kIo. For any other
// errno, the result is `otherwise`.
ErrorCode file_error_code(int error, ErrorCode otherwise);

// The remedy that ends a message: "free space there, or name a file on another disk".
const char* file_remedy(int error);

}  // namespace sluice
