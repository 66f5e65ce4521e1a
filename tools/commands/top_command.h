// `sluice top` shows what running jobs are doing. The command reads the status pages of these jobs.
#pragma once

#include <cstdint>

namespace sluice {

struct TopOptions {
  bool once = false;
  bool as_json = false;        // once
  bool as_prometheus = false;  // once
  bool on_web = false;
  std::uint16_t port = 0;  // of the page; 0 = any free one
};

// Shows all runs of this user. On a terminal, the command refreshes the view every second until
// Ctrl-C.
// Fails with kConfig if XDG_RUNTIME_DIR is not set, or if `port` cannot be taken.
int run_top(const TopOptions& options);

}  // namespace sluice
