// The command line of `sluice trace` and its subcommands.
//
// Thread rule: one thread, at start-up.
#pragma once

#include <CLI/CLI.hpp>

#include "tools/commands/trace_command.h"

namespace sluice {

struct TraceCommands {
  TraceSummaryOptions summary;
  TraceHtmlOptions html;
  TraceExportOptions files;
  TraceDiffOptions diff;
  TraceWhatIfOptions whatif;

  int run(const CLI::App* trace) const {
    if (trace->got_subcommand("html")) return run_trace_html(html);
    if (trace->got_subcommand("export")) return run_trace_export(files);
    if (trace->got_subcommand("diff")) return run_trace_diff(diff);
    if (trace->got_subcommand("whatif")) return run_trace_whatif(whatif);
    return run_trace_summary(summary);
  }
};

// Adds the subcommands to `app`. The parser writes the options to `commands`. `commands` must live
// until `app` has parsed the command line.
void add_trace(CLI::App& app, TraceCommands& commands);

}  // namespace sluice
