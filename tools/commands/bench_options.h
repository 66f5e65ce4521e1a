// The command line of `sluice bench` and its subcommands.
//
// Thread rule: one thread, at start-up.
#pragma once

#include <CLI/CLI.hpp>

#include "tools/commands/bench_adam_command.h"
#include "tools/commands/bench_gpu_command.h"
#include "tools/commands/bench_io_command.h"
#include "tools/commands/bench_matrix_command.h"
#include "tools/commands/bench_step_command.h"

namespace sluice {

struct BenchCommands {
  BenchAdamOptions adam;
  BenchGpuOptions gpu;
  BenchIoOptions io;
  BenchStepOptions step;
  BenchMatrixOptions matrix;

  int run(const CLI::App* bench) const {
    if (bench->got_subcommand("gpu")) return run_bench_gpu(gpu);
    if (bench->got_subcommand("io")) return run_bench_io(io);
    if (bench->got_subcommand("step")) return run_bench_step(step);
    if (bench->got_subcommand("matrix")) return run_bench_matrix(matrix);
    return run_bench_adam(adam);
  }
};

// Adds the subcommands to `app`. The parser writes the options to `commands`. `commands` must live
// until `app` has parsed the command line.
void add_bench(CLI::App& app, BenchCommands& commands);

}  // namespace sluice
