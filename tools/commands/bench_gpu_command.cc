#include "tools/commands/bench_gpu_command.h"
#include "tools/cli/temporary_file.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/topology.h"
#include "gpu/cuda/cuda_copies.h"
#include "gpu/cuda/device_math_choice.h"
#include "tools/bench/bench_adam.h"
#include "tools/bench/gpu_bench.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/json_text.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/bench_plots.h"
#include "tools/gpt/model/cuda_ops.h"
#include "tools/gpt/model/gpt_model.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

struct Shape {
  std::string_view name;
  gpt::GptConfig model;
  std::uint32_t sequences;
};
// GPT-2 and its extra-large sibling, and the width and depth of today's 7B models.
constexpr Shape kShapes[] = {
    {"124M", {12, 12, 768, 1024, 50257, true}, 16},
    {"1.5B", {48, 25, 1600, 1024, 50257, true}, 8},
    {"7B", {32, 32, 4096, 2048, 50257, true}, 4},
};

struct Place {
  std::string_view key;  // of --place
  std::string_view name;
  TierChoice parameters;
  TierChoice optimizer;
  UpdateProcessor update_on = UpdateProcessor::kCpu;
};
constexpr Place kPlaces[] = {
    {"device", "no offload", TierChoice::kDevice, TierChoice::kDevice},
    {"parameters", "parameters on the device", TierChoice::kDevice, TierChoice::kHost},
    {"updated", "... updated on the device", TierChoice::kDevice, TierChoice::kHost,
     UpdateProcessor::kDevice},
    {"host", "host offload", TierChoice::kHost, TierChoice::kHost},
    {"nvme", "NVMe offload", TierChoice::kNvme, TierChoice::kNvme},
};

const Shape& shape_of(const std::string& name) {
  for (const Shape& shape : kShapes)
    if (shape.name == name) return shape;
  throw Error(ErrorCode::kConfig,
              fmt::format("--shape is \"{}\"; it must be 124M, 1.5B or 7B", name));
}

// All places, or those that --place names, in the order of the table.
std::vector<Place> places_of(const std::vector<std::string>& keys) {
  std::vector<Place> found;
  for (const Place& place : kPlaces)
    if (keys.empty() || std::find(keys.begin(), keys.end(), place.key) != keys.end())
      found.push_back(place);
  return found;
}

Json json_of(const GpuSpread& spread) {
  return {{"median", spread.median}, {"least", spread.least}, {"most", spread.most}};
}

Json measure_copies(CudaDevice& device, Rates& rates) {
  const CopyBenchOptions options{.size_bytes = 1_GiB, .unit_bytes = 16_MiB, .rounds = 7};
  const auto plain = [&](const PlainCopy& ends) {
    return plain_copies_s(device, {ends.host_up, ends.device_up},
                          {ends.host_down, ends.device_down}, options.size_bytes,
                          options.unit_bytes, 1);
  };
  const std::vector<CopyBench> all =
      with_progress("measuring copies", [&] { return bench_copies(device, options, plain); });
  Json list = Json::array();
  for (const CopyBench& copies : all) {
    say("copies {:5} {:6.1f} GB/s, {:5.1f} % of a plain loop's {:.1f} ({:.1f} to {:.1f} %)\n",
        copies.direction, copies.gb_per_s.median, copies.percent.median,
        copies.plain_gb_per_s.median, copies.percent.least, copies.percent.most);
    if (copies.direction == "up") rates.up_bytes_per_second = 1e9 * copies.gb_per_s.median;
    if (copies.direction == "down") rates.down_bytes_per_second = 1e9 * copies.gb_per_s.median;
    list.push_back({{"direction", copies.direction},
                    {"gb_per_s", json_of(copies.gb_per_s)},
                    {"plain_gb_per_s", json_of(copies.plain_gb_per_s)},
                    {"percent_of_plain", json_of(copies.percent)}});
  }
  return list;
}

Json measure_adam(CudaDevice& device, Rates& rates) {
  const std::unique_ptr<DeviceMath> math = make_cuda_math(device);
  const AdamKernelBench adam = with_progress("measuring Adam on the GPU", [&] {
    return bench_adam_kernel(device, *math, std::uint64_t{1} << 28, 11);
  });
  say("Adam kernel  {:6.0f} GB/s, {:5.1f} % of a copy's {:.0f} ({:.1f} to {:.1f} %)\n",
      adam.gb_per_s.median, adam.percent.median, adam.copy_gb_per_s.median, adam.percent.least,
      adam.percent.most);
  rates.device_adam_parameters_per_second = adam.parameters_per_s();
  return {{"parameters", adam.parameters},
          {"parameters_per_s", adam.parameters_per_s()},
          {"gb_per_s", json_of(adam.gb_per_s)},
          {"copy_gb_per_s", json_of(adam.copy_gb_per_s)},
          {"percent_of_copy", json_of(adam.percent)}};
}

// Updates on all cores beside copies both ways: what of them memory can serve at once.
Json measure_host_memory(CudaDevice& device, Rates& rates) {
  const HostMemoryBench memory = with_progress("measuring host memory", [&] {
    UpdateMoves moves(kBenchCases[1], 1 << 26, topology().granted_cores);
    return bench_host_memory(device, {.size_bytes = 1_GiB, .unit_bytes = 16_MiB, .rounds = 3},
                             [&] { return moves.move(); });
  });
  say("host memory  {:6.1f} GB/s ({:.1f} to {:.1f}), of updates and copies at once; copies "
      "{:.1f}\n",
      memory.gb_per_s.median, memory.gb_per_s.least, memory.gb_per_s.most,
      memory.copy_gb_per_s.median);
  rates.host_memory_bytes_per_second = 1e9 * memory.gb_per_s.median;
  return {{"gb_per_s", json_of(memory.gb_per_s)}, {"copy_gb_per_s", json_of(memory.copy_gb_per_s)}};
}

// The processor's rate; it updates the state that the engine keeps.
double cpu_adam_parameters_per_s() {
  const BenchOptions options{
      .parameters = 1 << 26, .threads = topology().granted_cores, .rounds = 3};
  const BenchResult adam = with_progress("measuring Adam on the cores", [&] {
    return bench_adam(kBenchCases[1], options, [](unsigned) {});
  });
  say("Adam on {} cores: {:.2f} G parameters/s\n", topology().granted_cores,
      1e-9 * adam.parameters_per_s.median);
  return adam.parameters_per_s.median;
}

TrainConfig config_of(const Shape& shape, const Place& place, const BenchGpuOptions& options,
                      const std::string& token_file) {
  TrainConfig config;
  config.model = shape.model;
  config.sequences = shape.sequences;
  config.micro_batches = options.micro_batches;
  config.engine.optimizer.clip_norm = options.clip_norm;
  config.warmup_steps = 0;
  config.learning_rate = 1e-5;
  config.minimum_learning_rate = 1e-5;
  config.data_file = token_file;
  config.data_format = TokenFormat::kUint16;
  config.engine.threads = options.threads;
  config.engine.placement = {.parameters = place.parameters, .optimizer = place.optimizer};
  config.engine.optimizer.update_on = place.update_on;
  config.engine.memory.host_bytes = topology().memory_bytes / 10 * 9;
  config.engine.storage.paths = {options.path};
  return config;
}

// The operations of a step's products.
double compute_flops_of(const TrainConfig& config) {
  return gpt::flops_per_token(config.model) * config.sequences * config.micro_batches *
         config.model.context;
}

Json measure_training(const Shape& shape, const Place& place, const BenchGpuOptions& options,
                      const std::string& token_file, const Rates& rates) {
  Json entry{{"shape", shape.name}, {"place", place.name}};
  const auto left_out = [&](const std::string& why) {
    say("{:5} {:26} left out: {}\n", shape.name, place.name, why);
    entry["left_out"] = why;
    return entry;
  };
  try {
    std::optional<Progress> progress(
        std::in_place, fmt::format("measuring steps of {}, place {}", shape.name, place.key));
    const TrainConfig config = config_of(shape, place, options, token_file);
    const auto device = make_cuda_device();
    const auto ops = gpt::make_cuda_ops(*device, DType::kBf16, DType::kBf16);
    const TrainingBench step = bench_training(config, *device, *ops, options.steps, rates);
    progress.reset();
    const auto device_most = [&](StepPhase phase) {
      return step.device_most_bytes[static_cast<std::size_t>(phase)];
    };
    say("{:5} {:26} {:8.0f} tok/s, {:7.3f} s per step ({:.3f} to {:.3f}), {:5.1f} % of "
        "computation alone, {:.1f} % of T_bound, {:.1f} % of T_min, stall {:.3f} s\n      {:26} "
        "device memory of the "
        "engine: forward {}, backward {}, optimizer {}; activations {}\n",
        shape.name, place.name, step.tokens_per_s, step.step_s.median, step.step_s.least,
        step.step_s.most, step.percent_of_compute, step.percent_of_t_bound, step.percent_of_t_min,
        step.stall_s, "", format_bytes(device_most(StepPhase::kForward)),
        format_bytes(device_most(StepPhase::kBackward)),
        format_bytes(device_most(StepPhase::kOptimizer)), format_bytes(step.activation_bytes));
    entry.update({{"tokens_per_s", step.tokens_per_s},
                  {"step_s", json_of(step.step_s)},
                  {"stall_s", step.stall_s},
                  {"compute_step_s", step.compute_step_s},
                  {"compute_flops_per_s", compute_flops_of(config) / step.compute_step_s},
                  {"percent_of_compute", step.percent_of_compute},
                  {"micro_batches", options.micro_batches},
                  {"clip_norm", options.clip_norm},
                  {"threads", granted_threads(options.threads)},
                  {"t_bound_s", step.t_bound_s},
                  {"percent_of_t_bound", step.percent_of_t_bound},
                  {"t_min_s", step.t_min_s},
                  {"percent_of_t_min", step.percent_of_t_min},
                  {"products", ops->description()},
                  {"device_pool_bytes", step.device_pool_bytes},
                  {"host_pool_bytes", step.host_pool_bytes},
                  {"nvme_bytes", step.nvme_bytes},
                  {"device_most_bytes",
                   {{"forward", device_most(StepPhase::kForward)},
                    {"backward", device_most(StepPhase::kBackward)},
                    {"optimizer", device_most(StepPhase::kOptimizer)}}},
                  {"activation_bytes", step.activation_bytes}});
  } catch (const Error& error) {
    // Only what the machine has no room for: anything else is a failure of the whole bench.
    if (error.code() != ErrorCode::kOutOfMemory && error.code() != ErrorCode::kNoSpace) throw;
    const std::string text = error.what();
    return left_out(text.substr(0, text.find('\n')));
  }
  return entry;
}

}  // namespace

int run_bench_gpu(const BenchGpuOptions& options) {
  std::vector<std::string> names = options.shapes;
  if (names.empty())
    for (const Shape& shape : kShapes) names.emplace_back(shape.name);
  for (const std::string& name : names) (void)shape_of(name);
  OutputFiles outputs;
  OutputFile& json = outputs.add("--json", options.json_file);
  OutputFile& plot = outputs.add("--plot", options.plot_file);
  outputs.check();
  const auto begin = std::chrono::steady_clock::now();
  Json root;
  // Anew after each measurement, so that a run that is killed leaves those before.
  const auto save = [&] {
    if (!json.is_wanted() || !json.is_regular()) return;
    OutputFile whole("--json", options.json_file);
    write_whole(whole, json_text(root, 1) + "\n");
  };
  Rates rates;
  {
    const auto device = with_progress("starting the GPU", [] { return make_cuda_device(); });
    root["gpu"] = describe_cuda_device();
    root["processor"] = topology().processor;
    say("{}\n", describe_cuda_device());
    root["copies"] = measure_copies(*device, rates);
    save();
    root["adam"] = measure_adam(*device, rates);
    rates.adam_parameters_per_second = cpu_adam_parameters_per_s();
    root["cpu_adam_parameters_per_s"] = rates.adam_parameters_per_second;
    root["host_memory"] = measure_host_memory(*device, rates);
    const DriveMeasurement drive = with_progress(
        "measuring the drive", [&] { return measure_drive(options.path, 2_GiB, rates); });
    say("drive {:.2f} GB/s reading, {:.2f} writing; both at once takes {:.2f} of the sum of both, "
        "so "
        "the limits have {:.2f} and {:.2f}, {} duplex\n",
        drive.read * 1e-9, drive.write * 1e-9, drive.interference,
        rates.read_bytes_per_second * 1e-9, rates.write_bytes_per_second * 1e-9,
        rates.duplex == Duplex::kHalf ? "half" : "full");
    root["drive"] = {{"read_alone_bytes_per_second", drive.read},
                     {"write_alone_bytes_per_second", drive.write},
                     {"interference", drive.interference},
                     {"read_bytes_per_second", rates.read_bytes_per_second},
                     {"write_bytes_per_second", rates.write_bytes_per_second},
                     {"duplex", rates.duplex == Duplex::kHalf ? "half" : "full"}};
    flush_said();
    save();
  }
  // A signal and a failure remove it, too.
  catch_interrupts();
  const TemporaryFile tokens(
      (std::filesystem::canonical(options.path) / "sluice-bench-tokens").string(), 0600);
  write_random_tokens(tokens.name(), kShapes[0].model.vocabulary, 1 << 20);
  root["training"] = Json::array();
  for (const std::string& name : names) {
    for (const Place& place : places_of(options.places)) {
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
      if (elapsed.count() > options.seconds) {
        say("{:5} {:26} left out: --seconds are over\n", name, place.name);
        continue;
      }
      root["training"].push_back(
          measure_training(shape_of(name), place, options, tokens.name(), rates));
      flush_said();
      save();
    }
  }
  if (json.is_wanted()) write_whole(json, json_text(root, 1) + "\n");
  if (plot.is_wanted()) write_whole(plot, gpu_plot(root));
  return kExitOk;
}

}  // namespace sluice
