// The defaults alone: a test links others in their place, and sees every user of a plan follow.
#include "engine/plan/host_memory.h"

namespace sluice {
namespace {

constexpr std::uint64_t kDevicePart = 4;  // a quarter of the memory
constexpr std::uint64_t kHostPart = 2;    // half of the memory

}  // namespace

std::uint64_t default_device_bytes(std::uint64_t memory_bytes) {
  return memory_bytes / kDevicePart;
}

std::uint64_t default_host_bytes(std::uint64_t memory_bytes) {
  return memory_bytes / kHostPart;
}

std::uint64_t memory_of_default_host(std::uint64_t budget_bytes) {
  return budget_bytes * kHostPart;
}

}  // namespace sluice
