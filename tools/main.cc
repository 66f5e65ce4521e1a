// The sluice command: parses the command line, runs a subcommand, turns errors into messages and
// exit codes.
#include <csignal>
#include <cstdio>
#include <exception>
#include <map>
#include <new>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "base/error.h"
#include "tools/bench_adam_command.h"
#include "tools/bench_gpu_command.h"
#include "tools/bench_io_command.h"
#include "tools/bench_step_command.h"
#include "tools/doctor_command.h"
#include "tools/exit_codes.h"
#include "tools/generate_command.h"
#include "tools/plan_command.h"
#include "tools/step_regimes.h"
#include "tools/trace_command.h"
#include "tools/train_command.h"

namespace {

void add_train(CLI::App& app, sluice::TrainOptions& options) {
  CLI::App* train = app.add_subcommand(
      "train", "Train a GPT on a text, its state in device memory, host memory and on NVMe");
  train
      ->add_option("CONFIG", options.config_file,
                   "Config file (JSON with comments; docs/configuration.md)")
      ->required();
  train->add_option("--data", options.data_file, "Text or token file; overrides data.file");
  train->add_option("--steps", options.steps, "Overrides run.steps");
  train->add_option("--seed", options.seed, "Overrides run.seed");
  train
      ->add_option("--set", options.assignments,
                   "Override any key: --set memory.host=10MiB (may be repeated)")
      ->allow_extra_args(false)
      ->type_name("KEY=VALUE");
  train->add_option("--init", options.init_file,
                    "Start from the weights of a saved model (safetensors)");
  train->add_option("--save", options.save_file,
                    "Save the fp32 master weights at the end (safetensors)");
  train->add_option("--json", options.json_file,
                    "Write every step's figures and the state's SHA-256");
  train->add_option("--csv", options.csv_file, "Write one row of figures a step");
  train->add_option("--trace", options.trace_file,
                    "Record every transfer, copy, update and wait (sluice trace reads it)");
  train->add_flag("--quiet", options.quiet, "Print nothing but errors");
}

void add_generate(CLI::App& app, sluice::GenerateOptions& options) {
  CLI::App* generate =
      app.add_subcommand("generate", "Continue a prompt with a saved byte-level model");
  generate->add_option("--model", options.model_file, "Model file (safetensors)")->required();
  generate->add_option("--prompt", options.prompt, "Text to continue")->required();
  generate->add_option("--tokens", options.tokens, "How many bytes to add")->capture_default_str();
  generate
      ->add_option("--temperature", options.temperature,
                   "0 = the most probable byte; higher = more varied")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  generate
      ->add_option("--top-k", options.top_k, "Draw from the k most probable bytes; 0 = from all")
      ->capture_default_str();
  generate->add_option("--seed", options.seed, "Seed of the drawing")->capture_default_str();
  generate
      ->add_option("--threads", options.threads, "Threads; 0 = the cores granted to the process")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

void add_bench_adam(CLI::App& bench, sluice::BenchAdamOptions& options) {
  CLI::App* adam = bench.add_subcommand(
      "adam", "The CPU update against what this machine's memory allows, in the same run");
  adam->add_option("--parameters", options.parameters, "Parameters to update")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 40))
      ->capture_default_str();
  adam->add_option("--rounds", options.rounds, "Rounds; medians and quartiles are over these")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  adam->add_option("--threads", options.threads,
                   "One thread count; 0 = 1, 2, 4 ... up to the cores granted")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  adam->add_option("--input", options.input,
                   "plain; unaligned: arrays that begin behind a page; denormal: tiny gradients")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, sluice::BenchInput>{{"plain", sluice::BenchInput::kPlain},
                                                    {"unaligned", sluice::BenchInput::kUnaligned},
                                                    {"denormal", sluice::BenchInput::kDenormal}},
          CLI::ignore_case));
  adam->add_option("--json", options.json_file, "Write every figure");
  adam->add_flag("--quiet", options.quiet, "Print nothing but errors");
}

void add_bench_gpu(CLI::App& bench, sluice::BenchGpuOptions& options) {
  CLI::App* gpu = bench.add_subcommand(
      "gpu", "Copies, the optimizer's kernel and training steps on the first GPU");
  gpu->add_option("--shape", options.shapes, "124M, 1.5B or 7B (may be repeated); default: all")
      ->allow_extra_args(false);
  gpu->add_option("--path", options.path, "Folder of the storage")->capture_default_str();
  gpu->add_option("--steps", options.steps, "Counted steps of each training")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  gpu->add_option("--seconds", options.seconds, "No measurement begins after so many")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  gpu->add_option("--json", options.json_file, "Write the figures");
}

void add_bench_io(CLI::App& bench, sluice::BenchIoOptions& options) {
  CLI::App* io = bench.add_subcommand(
      "io", "Read, write and the optimizer's mixed pattern on the drives behind storage paths");
  io->add_option("--path", options.paths, "Folder on a drive (may be repeated)")
      ->required()
      ->allow_extra_args(false);
  io->add_option("--json", options.json_file, "Write a calibration file");
  io->add_option("--size", options.size, "Size of the scratch file on each path")
      ->capture_default_str();
  io->add_option("--pattern", options.patterns, "read, write or mixed (default: all three)")
      ->check(CLI::IsMember({"read", "write", "mixed"}))
      ->allow_extra_args(false);
  io->add_option("--request", options.requests, "Size of a request (default: 1MiB and 4MiB)")
      ->allow_extra_args(false);
  io->add_option("--depth", options.depths, "Requests in flight (default: 4, 16 and 32)")
      ->allow_extra_args(false);
  io->add_option("--rounds", options.rounds, "Measurements of each case; the median counts")
      ->capture_default_str();
  io->add_option("--backend", options.backend, "As storage.backend")
      ->check(CLI::IsMember({"auto", "uring", "threads", "sync"}))
      ->capture_default_str();
}

void add_bench_step(CLI::App& bench, sluice::BenchStepOptions& options) {
  CLI::App* step = bench.add_subcommand(
      "step", "Training steps under every overlap policy, against their limits");
  step->add_option("--regime", options.regimes, "What binds (may be repeated; default: all)")
      ->check(CLI::IsMember(sluice::step_regimes()))
      ->allow_extra_args(false);
  step->add_option("--policy", options.policies,
                   "As optimizer.overlap (may be repeated; default: all)")
      ->check(CLI::IsMember({"serial", "deferred", "eager", "speculative"}))
      ->allow_extra_args(false);
  step->add_option("--steps", options.steps, "Measured steps of each policy")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  step->add_option("--parameters", options.parameters, "Parameters of the model")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 40))
      ->capture_default_str();
  step->add_option("--units", options.units, "Units of the model, all alike")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  step->add_option("--path", options.path, "Folder on a drive")->capture_default_str();
  step->add_option("--rate", options.rate, "What the drive is throttled to, a second")
      ->capture_default_str();
  step->add_option("--lanes", options.lanes,
                   "As optimizer.lanes (default: a tenth of the model's blocks)")
      ->check(CLI::Range(1, 100000));
  step->add_option("--window", options.window_units, "Units that the device window has room for")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  step->add_option("--trace", options.trace_file, "Record the steps of one regime and policy");
  step->add_option("--memory-share", options.memory_share,
                   "Share of the state at home in host memory")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  step->add_option("--json", options.json_file, "Write every figure");
}

void add_plan(CLI::App& app, sluice::PlanOptions& options) {
  CLI::App* plan = app.add_subcommand(
      "plan", "Memory, traffic and time of a step before a run, and of other places for the state");
  plan->add_option("CONFIG", options.config_file, "Config file, as for train")->required();
  plan->add_option("--set", options.assignments, "Override any key (may be repeated)")
      ->allow_extra_args(false)
      ->type_name("KEY=VALUE");
  plan->add_option("--ranks", options.ranks, "Ranks that share the state")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  plan->add_flag("--stages", options.stages, "Also what each ZeRO stage leaves on one rank");
  plan->add_option("--parameters", options.parameters,
                   "Plan for a model of so many parameters (such as 70e9), not the config's");
  plan->add_option("--layers", options.layers, "Units of that model, all alike")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  plan->add_option("--tokens", options.tokens,
                   "Tokens of a step and rank (default: the config's batch)");
  sluice::PlanRateOptions& rates = options.rates;
  plan->add_option("--io", rates.io_file, "Calibration written by bench io --json");
  plan->add_option("--adam", rates.adam_file, "Figures written by bench adam --json");
  plan->add_option("--read-rate", rates.read, "Storage reads, bytes a second (such as 6GB)");
  plan->add_option("--write-rate", rates.write, "Storage writes");
  plan->add_option("--duplex", rates.duplex, "Whether storage reads and writes at once")
      ->check(CLI::IsMember({"full", "half"}));
  plan->add_option("--copy-rate", rates.copy, "Copies to and from the device, each way");
  plan->add_option("--adam-rate", rates.adam,
                   "Parameters that Adam updates a second (such as 2e9)");
  plan->add_option("--device-adam-rate", rates.device_adam,
                   "The same of the device, for state at home there");
  plan->add_option("--flops", rates.flops, "Operations a second that computation reaches");
  plan->add_option("--bytes-written-rating", options.bytes_written_rating,
                   "What the drives may be written in their life (such as 1200TB)");
  plan->add_option("--json", options.json_file, "Write the plan");
}

void add_trace_files(CLI::App* command, std::vector<std::string>& files) {
  command->add_option("FILE", files, "Trace files, one of each rank")->required();
}

struct TraceCommands {
  sluice::TraceSummaryOptions summary;
  sluice::TraceHtmlOptions html;
  sluice::TraceExportOptions files;
  sluice::TraceDiffOptions diff;
  sluice::TraceWhatIfOptions whatif;

  int run(const CLI::App* trace) const {
    if (trace->got_subcommand("html")) return sluice::run_trace_html(html);
    if (trace->got_subcommand("export")) return sluice::run_trace_export(files);
    if (trace->got_subcommand("diff")) return sluice::run_trace_diff(diff);
    if (trace->got_subcommand("whatif")) return sluice::run_trace_whatif(whatif);
    return sluice::run_trace_summary(summary);
  }
};

void add_trace_outputs(CLI::App& trace, TraceCommands& commands) {
  CLI::App* html = trace.add_subcommand("html", "A page with timeline, maps and tables");
  add_trace_files(html, commands.html.files);
  html->add_option("-o,--output", commands.html.output, "The page")->required();
  html->add_option("--io", commands.html.calibration,
                   "Calibration written by bench io --json, to compare with");
  CLI::App* files = trace.add_subcommand("export", "Records for other programs");
  add_trace_files(files, commands.files.files);
  files->add_option("--chrome", commands.files.chrome_file, "JSON for Perfetto");
  files->add_option("--csv", commands.files.csv_file, "One row a record");
  files->add_option("--json", commands.files.json_file, "Steps, waits and records");
}

void add_trace_questions(CLI::App& trace, TraceCommands& commands) {
  CLI::App* diff = trace.add_subcommand("diff", "How much longer the second trace's steps are");
  diff->add_option("A", commands.diff.before, "The trace to compare with")->required();
  diff->add_option("B", commands.diff.after, "The trace to look at")->required();
  diff->add_option("--percent", commands.diff.percent,
                   "Exit with 3 when steps are longer by more than this")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  CLI::App* whatif = trace.add_subcommand("whatif", "A step under other settings");
  whatif->add_option("FILE", commands.whatif.file, "Trace file")->required();
  whatif
      ->add_option("--set", commands.whatif.settings,
                   "nvme, nvme.read, nvme.write, nvme.latency, copy, adam or compute=2x; drives, "
                   "prefetch_window or lanes=N; memory.host or memory.device=SIZE; policy=NAME "
                   "(may be repeated)")
      ->allow_extra_args(false)
      ->type_name("KEY=VALUE");
}

void add_trace(CLI::App& app, TraceCommands& commands) {
  sluice::TraceSummaryOptions& summary = commands.summary;
  CLI::App* trace = app.add_subcommand("trace", "Look at what train --trace recorded");
  trace->require_subcommand(1);
  CLI::App* command = trace->add_subcommand(
      "summary", "Where a step's time went, how the drives did, and what would help");
  add_trace_files(command, summary.files);
  command->add_option("--io", summary.calibration,
                      "Calibration written by bench io --json, to compare with");
  command->add_option("--bytes-written-rating", summary.bytes_written_rating,
                      "What the drives may be written in their life (such as 1200TB)");
  add_trace_outputs(*trace, commands);
  add_trace_questions(*trace, commands);
}

void add_doctor(CLI::App& app, std::vector<std::string>& paths) {
  CLI::App* doctor = app.add_subcommand(
      "doctor", "Look at what this machine gives Sluice, and say how to mend what is missing");
  doctor->add_option("--path", paths, "Storage folder to look at (may be repeated)")
      ->allow_extra_args(false)
      ->capture_default_str();
}

// Runs the subcommand that was parsed.
struct Commands {
  sluice::TrainOptions train;
  sluice::GenerateOptions generate;
  sluice::BenchGpuOptions bench_gpu;
  sluice::BenchIoOptions bench_io;
  sluice::BenchAdamOptions bench_adam;
  sluice::BenchStepOptions bench_step;
  sluice::DoctorOptions doctor;
  sluice::PlanOptions plan;
  TraceCommands trace;

  int run(const CLI::App& app) const {
    if (app.got_subcommand("train")) return sluice::run_train(train);
    if (app.got_subcommand("bench")) {
      const CLI::App* bench = app.get_subcommand("bench");
      if (bench->got_subcommand("gpu")) return sluice::run_bench_gpu(bench_gpu);
      if (bench->got_subcommand("io")) return sluice::run_bench_io(bench_io);
      if (bench->got_subcommand("step")) return sluice::run_bench_step(bench_step);
      return sluice::run_bench_adam(bench_adam);
    }
    if (app.got_subcommand("plan")) return sluice::run_plan(plan);
    if (app.got_subcommand("trace")) return trace.run(app.get_subcommand("trace"));
    if (app.got_subcommand("doctor")) return sluice::run_doctor(doctor);
    return sluice::run_generate(generate);
  }
};

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond `ulimit -f` is an error with a message
  CLI::App app(
      "Sluice trains models whose training state fits neither the GPU nor the host's memory.",
      "sluice");
  app.set_version_flag("--version", "sluice " SLUICE_VERSION);
  app.require_subcommand(1);
  Commands commands;
  add_train(app, commands.train);
  add_generate(app, commands.generate);
  add_plan(app, commands.plan);
  CLI::App* bench = app.add_subcommand("bench", "Measure this machine");
  bench->require_subcommand(1);
  add_bench_gpu(*bench, commands.bench_gpu);
  add_bench_io(*bench, commands.bench_io);
  add_bench_adam(*bench, commands.bench_adam);
  add_bench_step(*bench, commands.bench_step);
  add_trace(app, commands.trace);
  add_doctor(app, commands.doctor.paths);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? sluice::kExitOk : sluice::kExitUsage;
  }
  try {
    const int code = commands.run(app);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
      throw sluice::Error(sluice::ErrorCode::kIo, "cannot write to standard output");
    return code;
  } catch (const sluice::Error& error) {
    fmt::print(stderr, "sluice: {}\n", error.what());
    return sluice::exit_code_of(error.code());
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "sluice: the machine's memory is used up; train a smaller model or batch\n");
    return sluice::kExitResource;
  } catch (const std::exception& error) {
    fmt::print(stderr, "sluice: internal error: {}\n", error.what());
    return sluice::kExitInternal;
  }
}
