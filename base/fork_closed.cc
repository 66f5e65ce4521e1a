#include "base/fork_closed.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {
namespace {

constexpr std::size_t kDescriptorsMax = 512;
std::array<std::atomic<int>, kDescriptorsMax> registered;  // descriptor + 1; 0: free

void close_all() {
  for (std::atomic<int>& entry : registered)
    if (const int descriptor = entry.exchange(0) - 1; descriptor >= 0) ::close(descriptor);
}

}  // namespace

void close_in_children(int descriptor) {
  static const int result = ::pthread_atfork(nullptr, nullptr, close_all);
  SLUICE_CHECK(result == 0, "a fork handler can be registered");
  for (std::atomic<int>& entry : registered) {
    int none = 0;
    if (entry.compare_exchange_strong(none, descriptor + 1)) return;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("more than {} storage paths and folders of checkpoints are locked by one "
                          "process",
                          kDescriptorsMax));
}

bool forget_in_children(int descriptor) {
  for (std::atomic<int>& entry : registered) {
    int own = descriptor + 1;
    if (entry.compare_exchange_strong(own, 0)) return true;
  }
  return false;
}

}  // namespace sluice
