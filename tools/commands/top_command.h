// `sluice top` shows what running jobs are doing. The command reads the status pages of the jobs.
#pragma once

#include <cstdint>

namespace sluice {

struct TopOptions {
  bool once = false;
  bool as_json = false;        // print JSON once
  bool as_prometheus = false;  // print text for Prometheus once
  bool on_web = false;
  std::uint16_t port = 0;  // port of the page; 0 = any free port
};

// Shows all runs of this user. On a terminal, the command refreshes the view every second until
// Ctrl-C.
// Fails with kConfig if XDG_RUNTIME_DIR is not set, or if `port` is not available.
int run_top(const TopOptions& options);

}  // namespace sluice
