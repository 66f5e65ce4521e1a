#include "tools/commands/bench_options.h"

#include <map>
#include <string>

#include "tools/bench/step_regimes.h"
#include "tools/cli/option_checks.h"
#include "tools/cli/option_files.h"

namespace sluice {
namespace {

void add_bench_adam(CLI::App& bench, BenchAdamOptions& options) {
  CLI::App* adam =
      bench.add_subcommand("adam", "Measure the CPU update against this machine's memory");
  adam->add_option("--parameters", options.parameters, "Parameters to update")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 40))
      ->capture_default_str();
  adam->add_option("--rounds", options.rounds, "Rounds that medians and quartiles are taken over")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  adam->add_option("--threads", options.threads,
                   "One thread count; 0 = 1, 2, 4 ... up to the cores granted")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  adam->add_option(
          "--input", options.input,
          "plain; unaligned: arrays begin one element after a page; denormal: tiny gradients")
      ->transform(one_of({{"plain", static_cast<int>(BenchInput::kPlain)},
                          {"unaligned", static_cast<int>(BenchInput::kUnaligned)},
                          {"denormal", static_cast<int>(BenchInput::kDenormal)}}))
      ->default_str("plain");
  adam->add_option("--state", options.moments,
                   "Numbers in which the moments are kept, as optimizer.state")
      ->transform(one_of({{"fp32", static_cast<int>(OptimizerState::kFp32)},
                          {"bf16", static_cast<int>(OptimizerState::kBf16)},
                          {"8bit", static_cast<int>(OptimizerState::k8bit)}}))
      ->default_str("fp32");
  add_output(adam, "--json", options.json_file, "Write every figure");
  add_output(adam, "--plot", options.plot_file, "Draw the figures, as SVG");
  adam->add_flag("--quiet", options.quiet, "Print nothing but errors");
}

void add_bench_gpu(CLI::App& bench, BenchGpuOptions& options) {
  CLI::App* gpu = bench.add_subcommand(
      "gpu", "Measure copies, the optimizer's kernel and training steps on the first GPU");
  gpu->add_option("--shape", options.shapes, "124M, 1.5B or 7B (may be repeated); default: all")
      ->allow_extra_args(false);
  gpu->add_option("--place", options.places,
                  "Place of the state (may be repeated): device, parameters (on the device), "
                  "updated (there, too), host or nvme; default: all")
      ->check(CLI::IsMember({"device", "parameters", "updated", "host", "nvme"}))
      ->allow_extra_args(false);
  gpu->add_option("--path", options.path, "Folder for state on storage")->capture_default_str();
  gpu->add_option("--threads", options.threads, "As run.threads; default: all cores")
      ->check(CLI::Range(1, 4096));
  gpu->add_option("--steps", options.steps, "Counted steps of each training")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  gpu->add_option("--micro-batches", options.micro_batches, "As batch.micro_batches")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  gpu->add_option("--clip-norm", options.clip_norm, "As optimizer.clip_norm")
      ->check(between(0, 1e30))
      ->capture_default_str();
  gpu->add_option("--seconds", options.seconds, "Begin no measurement after so many seconds")
      ->check(between(1e-3, 1e6))
      ->capture_default_str();
  add_output(gpu, "--json", options.json_file, "Write the figures");
  add_output(gpu, "--plot", options.plot_file, "Draw the figures, as SVG");
}

void add_bench_io(CLI::App& bench, BenchIoOptions& options) {
  CLI::App* io = bench.add_subcommand(
      "io",
      "Measure the drives behind storage paths: reads, writes and the optimizer's mixed pattern");
  io->add_option("--path", options.paths, "Folder on a drive (may be repeated)")
      ->required()
      ->allow_extra_args(false);
  add_output(io, "--json", options.json_file, "Write a calibration file");
  add_output(io, "--plot", options.plot_file, "Draw the figures, as SVG");
  io->add_option("--size", options.size, "Size of the scratch file on each path")
      ->check(is_size())
      ->type_name("SIZE")
      ->capture_default_str();
  io->add_option("--pattern", options.patterns, "read, write or mixed (default: all three)")
      ->check(CLI::IsMember({"read", "write", "mixed"}))
      ->allow_extra_args(false);
  io->add_option("--request", options.requests, "Size of a request (default: 1MiB and 4MiB)")
      ->check(is_size())
      ->type_name("SIZE")
      ->allow_extra_args(false);
  io->add_option("--depth", options.depths, "Requests in flight (default: 4, 16 and 32)")
      ->check(CLI::Range(1, 1024))
      ->allow_extra_args(false);
  io->add_option("--rounds", options.rounds, "Measurements of each case; the median is printed")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  io->add_option("--backend", options.backend, "As storage.backend")
      ->check(CLI::IsMember({"auto", "uring", "threads", "sync"}))
      ->capture_default_str();
}

void add_bench_matrix(CLI::App& bench, BenchMatrixOptions& options) {
  CLI::App* matrix = bench.add_subcommand(
      "matrix",
      "Measure memory and time by ZeRO stage and offload, beside the plan; with mpirun, on ranks");
  matrix->add_option("--steps", options.steps, "Measured steps of each cell")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  matrix->add_option("--parameters", options.parameters, "Parameters of the model")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 40))
      ->capture_default_str();
  matrix->add_option("--units", options.units, "Units of the model, all alike")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  matrix->add_option("--path", options.path, "Folder on a drive")->capture_default_str();
  matrix
      ->add_option("--rate", options.rate,
                   "Rate that the drive of each rank is throttled to, per second")
      ->transform(rate_suffix())
      ->check(is_size())
      ->type_name("SIZE")
      ->capture_default_str();
  matrix
      ->add_option("--compute-ms", options.compute_ms,
                   "Milliseconds of emulated computation in a step")
      ->check(between(0, 60000))
      ->capture_default_str();
  add_output(matrix, "--json", options.json_file, "Write every figure");
  add_output(matrix, "--plot", options.plot_file, "Draw the steps, as SVG");
}

void add_bench_step(CLI::App& bench, BenchStepOptions& options) {
  CLI::App* step = bench.add_subcommand(
      "step", "Measure training steps under every overlap policy, against their limits");
  step->add_option("--regime", options.regimes,
                   "The resource that limits a step (may be repeated; default: all)")
      ->check(CLI::IsMember(step_regimes()))
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
  step->add_option("--rate", options.rate, "Rate that the drive is throttled to, per second")
      ->transform(rate_suffix())
      ->check(is_size())
      ->type_name("SIZE")
      ->capture_default_str();
  step->add_option("--lanes", options.lanes,
                   "As optimizer.lanes (default: a tenth of the model's blocks)")
      ->check(CLI::Range(1, 100000));
  step->add_option("--window", options.window_units, "Units that fit into the device window")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  add_output(step, "--trace", options.trace_file, "Record the steps of one regime and policy");
  step->add_option("--memory-share", options.memory_share,
                   "Share of the state at home in host memory")
      ->check(between(0, 1))
      ->capture_default_str();
  step->add_option("--commit-every", options.commit_every,
                   "Keep the state in a durable store, and commit every N-th step; 0 = scratch")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  step->add_option("--flush-ms", options.flush_ms,
                   "Milliseconds that a flush occupies the throttled drive")
      ->check(between(0, 60000))
      ->capture_default_str();
  step->add_option("--write-cache", options.write_cache,
                   "Size of the throttled drive's write cache, which a flush writes out first")
      ->check(is_size())
      ->type_name("SIZE")
      ->capture_default_str();
  step->add_option("--save-every", options.save_every,
                   "Write a checkpoint beside every N-th step, past the throttled drive; 0 = none")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  step->add_flag("--with-bare", options.has_bare,
                 "Measure each policy without commits and checkpoints, too, in turns");
  add_output(step, "--json", options.json_file, "Write every figure");
  add_output(step, "--plot", options.plot_file, "Draw the figures, as SVG");
}

}  // namespace

void add_bench(CLI::App& app, BenchCommands& commands) {
  CLI::App* bench = app.add_subcommand("bench", "Measure this machine");
  bench->require_subcommand(1);
  add_bench_gpu(*bench, commands.gpu);
  add_bench_io(*bench, commands.io);
  add_bench_adam(*bench, commands.adam);
  add_bench_step(*bench, commands.step);
  add_bench_matrix(*bench, commands.matrix);
}

}  // namespace sluice
