#include "tools/commands/trace_options.h"

#include <string>
#include <vector>

#include "tools/cli/option_checks.h"
#include "tools/cli/option_files.h"

namespace sluice {
namespace {

void add_trace_files(CLI::App* command, std::vector<std::string>& files) {
  command->add_option("FILE", files, "Trace files, one of each rank")
      ->required()
      ->type_name("FILE");
}

void add_json(CLI::App* command, std::string& path) {
  add_output(command, "--json", path, "Write every figure; - for standard output");
}

void add_steps(CLI::App* command, std::string& steps) {
  command
      ->add_option("--steps", steps,
                   "Only these steps, such as 100-120: for traces that are too large for memory")
      ->type_name("FIRST-LAST");
}

void add_trace_outputs(CLI::App& trace, TraceCommands& commands) {
  CLI::App* html = trace.add_subcommand("html", "Write a page with timeline, maps and tables");
  add_trace_files(html, commands.html.files);
  add_steps(html, commands.html.steps);
  add_output(html, "-o,--output", commands.html.output, "The page")->required();
  add_input(html, "--io", commands.html.calibration,
            "Calibration written by bench io --json, to compare with");
  CLI::App* files = trace.add_subcommand("export", "Write records for other programs");
  add_trace_files(files, commands.files.files);
  add_steps(files, commands.files.steps);
  add_output(files, "--perfetto", commands.files.perfetto_file,
             "Perfetto's own format, with tracks for each unit");
  add_output(files, "--chrome", commands.files.chrome_file, "JSON for chrome://tracing");
  add_output(files, "--csv", commands.files.csv_file, "One row per record");
  add_output(files, "--json", commands.files.json_file, "Steps, waits and records");
}

void add_trace_questions(CLI::App& trace, TraceCommands& commands) {
  CLI::App* diff = trace.add_subcommand("diff", "Say how much longer the second trace's steps are");
  add_input(diff, "A", commands.diff.before, "The trace to compare with")->required();
  add_input(diff, "B", commands.diff.after, "The trace to look at")->required();
  diff->add_option("--percent", commands.diff.percent,
                   "Exit with 3 when steps are longer by more than this")
      ->check(between(0, 1e6))
      ->capture_default_str();
  add_steps(diff, commands.diff.steps);
  add_json(diff, commands.diff.json_file);
  add_output(diff, "--html", commands.diff.page_file, "Write a page with bars and tables");
  CLI::App* whatif = trace.add_subcommand("whatif", "Predict a step under other settings");
  add_input(whatif, "FILE", commands.whatif.file, "Trace file")->required();
  whatif
      ->add_option("--set", commands.whatif.settings,
                   "nvme, nvme.read, nvme.write, nvme.latency, copy, adam or compute=2x; drives, "
                   "prefetch_window or lanes=N; memory.host or memory.device=SIZE; policy=NAME "
                   "(may be repeated)")
      ->allow_extra_args(false)
      ->type_name("KEY=VALUE");
  add_steps(whatif, commands.whatif.steps);
  add_json(whatif, commands.whatif.json_file);
}

}  // namespace

void add_trace(CLI::App& app, TraceCommands& commands) {
  TraceSummaryOptions& summary = commands.summary;
  CLI::App* trace = app.add_subcommand("trace", "Read what train --trace recorded");
  trace->require_subcommand(1);
  CLI::App* command = trace->add_subcommand(
      "summary", "Say where a step's time went, how the drives did, and what would help");
  add_trace_files(command, summary.files);
  add_input(command, "--io", summary.calibration,
            "Calibration written by bench io --json, to compare with");
  command
      ->add_option("--bytes-written-rating", summary.bytes_written_rating,
                   "Bytes that may be written to the drives in their life (such as 1200TB)")
      ->check(is_size())
      ->type_name("SIZE");
  add_steps(command, summary.steps);
  add_json(command, summary.json_file);
  add_trace_outputs(*trace, commands);
  add_trace_questions(*trace, commands);
}

}  // namespace sluice
