#include "engine/store/missing_promise.h"

#include <sys/statfs.h>

#include <cstdint>

namespace sluice {
namespace {

// linux/magic.h has not all of them.
constexpr std::uint32_t kTmpfs = 0x01021994;
constexpr std::uint32_t kRamfs = 0x858458f6;
constexpr std::uint32_t kOverlayFs = 0x794c7630;
constexpr std::uint32_t kNfs = 0x6969;
constexpr std::uint32_t kCifs = 0xff534d42;
constexpr std::uint32_t kSmb2 = 0xfe534d42;
constexpr std::uint32_t kFuse = 0x65735546;

}  // namespace

std::string missing_promise(const std::string& directory) {
  struct statfs system {};
  if (::statfs(directory.c_str(), &system) != 0) return {};
  switch (static_cast<std::uint32_t>(system.f_type)) {
    case kTmpfs:
    case kRamfs: return "memory, not a drive: a durable store is gone when the machine stops";
    case kOverlayFs:
      return "an overlay, such as a container's own files: a durable store is gone with it";
    case kNfs:
    case kCifs:
    case kSmb2:
      return "on another machine: a durable store is as safe from a power cut as that one's flush";
    case kFuse:
      return "a file system of a program (FUSE): a durable store is as safe as that program's "
             "flush";
    default: return {};
  }
}

}  // namespace sluice
