// `sluice top` shows what running jobs are doing, from their status pages.
#pragma once

namespace sluice {

struct TopOptions {
  bool once = false;
  bool as_json = false;        // once
  bool as_prometheus = false;  // once
};

// Shows all runs of this user. On a terminal, refreshes the view every second until Ctrl-C.
// Fails with: kConfig without XDG_RUNTIME_DIR.
int run_top(const TopOptions& options);

}  // namespace sluice
