// Files in memory, which several mappings or processes can share.
//
// Thread rule: any thread.
#pragma once

#include "base/process_fd.h"

namespace sluice {

// Makes an empty file in memory. `name` appears in /proc/PID/maps. Seals can be added to the file.
// The descriptor is closed at exec and in forked
// children. If the kernel refuses to make the file, the result has no
// descriptor, and errno says why.
ProcessFd make_memory_file(const char* name);

}  // namespace sluice
