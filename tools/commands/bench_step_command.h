// `sluice bench step` measures the time of a training step under every overlap policy. The command
// emulates computation and throttles the drive, so that the times of steps have known limits. The
// command compares the measured times with the limits.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace sluice {

struct BenchStepOptions {
  std::vector<std::string> regimes;   // empty = all
  std::vector<std::string> policies;  // empty = all
  std::uint64_t parameters = 100'000'000;
  std::uint32_t units = 16;
  unsigned steps = 12;  // measured steps for each policy and regime
  std::string path = "/var/tmp";
  std::string rate = "1GB";            // bytes per second of the throttled drive
  std::optional<std::uint32_t> lanes;  // empty = a tenth of the blocks
  std::uint32_t window_units = 3;      // the units that fit the device window
  std::string trace_file;              // empty = none; a trace needs one regime and one policy
  double memory_share = 0;             // the share of the state in host memory
  std::uint32_t commit_every = 0;      // steps per commit of a durable store; 0 = scratch files
  double flush_ms = 5;                 // the time for which a flush occupies the drive
  std::string write_cache = "0";       // size of the throttled drive's write cache
  std::uint32_t save_every = 0;        // steps from one checkpoint to the next; 0 = none
  bool has_bare = false;               // also measure without commits and checkpoints
  std::string json_file;
  std::string plot_file;
};

// Prints a table for each regime. Returns the exit code.
// Fails with kConfig if an option is wrong, and with kInput if the JSON file cannot be written.
// Also fails with the errors of Engine.
int run_bench_step(const BenchStepOptions& options);

}  // namespace sluice
