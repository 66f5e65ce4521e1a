#include "base/named_thread.h"

#include <pthread.h>

#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "base/float_environment.h"
#include "base/numa.h"

namespace sluice {
namespace {

constexpr std::size_t kNameBytesMax = 15;  // the kernel's

}  // namespace

std::thread start_thread(const std::string& name, std::function<void()> body) {
  try {
    return std::thread([shown = name.substr(0, kNameBytesMax), body = std::move(body)] {
      (void)::pthread_setname_np(::pthread_self(), shown.c_str());
      set_float_environment();
      NumaNodes::bind_new_thread();
      body();
    });
  } catch (const std::system_error& error) {
    throw thread_refused(fmt::format("the thread \"{}\"", name), error.code().value());
  }
}

Error thread_refused(const std::string& what, int error_number) {
  return Error(ErrorCode::kUnsupported,
               fmt::format("cannot start {}: {}; raise the number of processes (ulimit -u) or the "
                           "container's (pids.max of its cgroup), or leave room in memory for the "
                           "thread's stack (ulimit -v)",
                           what, errno_text(error_number)));
}

}  // namespace sluice
