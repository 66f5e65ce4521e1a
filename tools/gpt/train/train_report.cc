#include "tools/gpt/train/train_report.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/units.h>
#include "engine/engine_access.h"
#include "io/direct_file.h"
#include "tools/cli/json_text.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/gpt/model/gpt_model.h"

namespace sluice {
namespace {

constexpr int kBarWidth = 24;
constexpr std::size_t kBarColumnsLeast = 50;  // a narrower terminal has figures alone

// null when the limits are not known, or are of a step with an update that this one had not.
nlohmann::ordered_json percent_of(const RunRecord& run, StepCost StepLimits::*limit,
                                  std::size_t place) {
  if (!run.limits || !has_update(run, place)) return nullptr;
  return 100 * ((*run.limits).*limit).step_s / run.steps[place].time_s;
}

// The mean of all steps except the first, as for T_min and T_bound.
double mean_step_s(const RunRecord& run) {
  const std::size_t first = run.steps.size() > 1 ? 1 : 0;
  double sum_s = 0;
  for (std::size_t i = first; i < run.steps.size(); ++i) sum_s += run.steps[i].time_s;
  return sum_s / static_cast<double>(run.steps.size() - first);
}

// Whether the losses equal those of the same training in memory. No value where the run began with
// other state.
std::optional<bool> has_losses_of_memory(const RunRecord& run) {
  if (run.resumed_steps) return std::nullopt;
  std::vector<double> losses;
  for (const StepRecord& step : run.steps) losses.push_back(step.loss);
  return run.in_memory->has_losses(losses);
}

// null where nothing was compared.
nlohmann::ordered_json comparison_json(const RunRecord& run) {
  if (!run.in_memory || run.steps.empty()) return nullptr;
  const MemoryComparison& in_memory = *run.in_memory;
  nlohmann::ordered_json equal = nullptr;
  if (const std::optional<bool> has_losses = has_losses_of_memory(run)) equal = *has_losses;
  return {{"steps", in_memory.losses.size()},
          {"step_s", in_memory.step_s},
          {"percent", 100 * in_memory.step_s / mean_step_s(run)},
          {"device_pool_bytes", in_memory.device_pool_bytes},
          {"host_pool_bytes", in_memory.host_pool_bytes},
          {"losses_are_equal", equal}};
}

nlohmann::ordered_json limits_json(const RunRecord& run) {
  if (!run.limits) return nullptr;
  const Rates& rates = run.limits->rates;
  return {{"t_min_s", run.limits->least.step_s},
          {"scarcest", name_of(run.limits->least.scarcest())},
          {"t_bound_s", run.limits->bound.step_s},
          {"policy", name_of(run.limits->policy)},
          {"read_bytes_per_second", rates.read_bytes_per_second},
          {"write_bytes_per_second", rates.write_bytes_per_second},
          {"copy_bytes_per_second", rates.up_bytes_per_second},
          {"adam_parameters_per_second", rates.adam_parameters_per_second},
          {"norm_parameters_per_second", rates.norm_parameters_per_second}};
}

// A store's files are there after the run. Gradients and activations are beside them.
std::string storage_files_text(const Placement& placement, const std::string& store) {
  if (store.empty()) return "in scratch files without a name";
  const std::uint64_t scratch_bytes =
      placement.nvme_gradient_bytes + placement.nvme_activation_bytes;
  return fmt::format("in the files of the store \"{}\", which stay{}", store,
                     scratch_bytes == 0 ? ""
                                        : fmt::format("; {} of it in scratch files without a name",
                                                      format_bytes(scratch_bytes)));
}

std::string duration_text(double duration_s) {
  const auto whole = static_cast<std::uint64_t>(duration_s);
  return whole >= 3600 ? fmt::format("{}h{:02}m", whole / 3600, whole / 60 % 60)
                       : fmt::format("{}m{:02}s", whole / 60, whole % 60);
}

// The share of all multiply-adds, in percent; null where none is counted.
nlohmann::ordered_json share_of(std::uint64_t work, const RunRecord& run) {
  const std::uint64_t all = run.matrix_work.openblas + run.matrix_work.onednn;
  if (all == 0) return nullptr;
  return 100 * static_cast<double>(work) / static_cast<double>(all);
}

// "5746 tok/s  0.108 TFLOP/s  MFU 41.0 %", the tokens in `width` columns.
std::string speed_text(const StepRecord& record, int width) {
  const auto share = record.mfu();
  return fmt::format("{:>{}.0f} tok/s  {:.3g} TFLOP/s{}", record.tokens_per_s(), width,
                     1e-12 * record.flops_per_s(),
                     share ? fmt::format("  MFU {:.1f} %", 100 * *share) : "");
}

}  // namespace

StepRecord record_of(const TrainConfig& config, const TrainedStep& trained, std::uint64_t step,
                     double time_s, std::uint32_t ranks, double peak_flops) {
  const StepReport& report = trained.report;
  const std::uint64_t tokens =
      std::uint64_t{config.sequences} * config.micro_batches * config.model.context * ranks;
  return {.step = step + 1,
          .loss = trained.loss,
          .gradient_norm = report.gradient_norm,
          .loss_scale = report.loss_scale,
          .skipped = report.skipped,
          .time_s = time_s,
          .tokens = tokens,
          .flops = gpt::flops_per_token(config.model) * static_cast<double>(tokens),
          .peak_flops = peak_flops * ranks,
          .nvme_read_bytes = report.nvme_read_bytes,
          .nvme_write_bytes = report.nvme_write_bytes,
          .rank_traffic = report.rank_traffic,
          .activation_out_bytes = report.activation_out_bytes,
          .activation_in_bytes = report.activation_in_bytes,
          .copies = report.copies,
          .stall_s = static_cast<double>(report.stall_ns) * 1e-9,
          .stall_for_update_s = static_cast<double>(report.stall_for_update_ns) * 1e-9,
          .optimizer_s = static_cast<double>(report.optimizer_ns) * 1e-9,
          .times = report.times,
          .drained_ns = trained.drained_ns,
          .policy = report.policy};
}

std::string validation_report(const RunRecord& run) {
  if (!run.validation_loss) return "";
  return fmt::format(
      "validation loss {:.4f} nats per token; a bigram model {}\n", *run.validation_loss,
      run.bigram_cross_entropy ? fmt::format("reaches {:.4f}", *run.bigram_cross_entropy)
                               : "was not counted to the end");
}

std::string matrix_report(const RunRecord& run) {
  const gpt::MatrixWork& work = run.matrix_work;
  if (work.openblas + work.onednn == 0) return {};
  return fmt::format("multiply-adds: oneDNN {:.1f} %, OpenBLAS {:.1f} %\n",
                     share_of(work.onednn, run).get<double>(),
                     share_of(work.openblas, run).get<double>());
}

std::string memory_comparison_report(const RunRecord& run) {
  if (!run.in_memory || run.steps.empty()) return {};
  const std::optional<bool> has_losses = has_losses_of_memory(run);
  const double in_memory_s = run.in_memory->step_s;
  return fmt::format(
      "the same training in memory takes {:.3f} s per step: this run, with {:.3f} s, has {:.1f} % "
      "of "
      "its speed{}\n",
      in_memory_s, mean_step_s(run), 100 * in_memory_s / mean_step_s(run),
      !has_losses   ? ""
      : *has_losses ? ", and its losses to the bit"
                    : ", AND OTHER LOSSES: computation depends on more than the state");
}

std::string copy_report(const RunRecord& run) {
  if (run.steps.empty()) return {};
  const std::size_t first = run.steps.size() > 1 ? 1 : 0;
  const std::uint64_t steps = run.steps.size() - first;
  CopyTraffic sum;
  for (std::size_t i = first; i < run.steps.size(); ++i) sum += run.steps[i].copies;
  if (sum.size_bytes() == 0)
    return "no parameters or gradients were copied for leases and updates\n";
  return fmt::format(
      "copied in memory in a step: {} of parameters for leases, {} of gradients, {} for updates\n",
      format_bytes(sum.parameter_bytes / steps), format_bytes(sum.gradient_bytes / steps),
      format_bytes(sum.update_bytes / steps));
}

std::string pool_table(const Engine& engine, const Config& config, std::uint64_t activation_bytes,
                       const HostMemory& memory) {
  const Placement& placement = placement_of(engine);
  std::string table = fmt::format("{:<8}{:<24}{:>10}  {}\n", "tier", "pool", "size", "what for");
  const auto row = [&](std::string_view tier, std::string_view name, std::uint64_t bytes,
                       std::string_view reason) {
    table += fmt::format("{:<8}{:<24}{:>10}  {}\n", tier, name, format_bytes(bytes), reason);
  };
  const auto sum = [&](Tier tier, std::uint64_t bytes, std::uint64_t budget_bytes) {
    row(name_of(tier), "= sum", bytes,
        fmt::format("of a budget of {}{}", format_bytes(budget_bytes),
                    tier == Tier::kDevice && memory.device_is_host
                        ? ", host memory, too: the sum below counts both"
                        : ""));
  };
  Tier tier = Tier::kDevice;
  for (const Pool& pool : placement.pools()) {
    if (pool.tier != tier && tier == Tier::kDevice)
      sum(tier, placement.device_bytes(), placement.device_budget_bytes);
    if (pool.tier != tier && tier == Tier::kHost)
      sum(tier, placement.host_bytes(), placement.host_budget_bytes);
    tier = pool.tier;
    if (pool.size_bytes != 0) row(name_of(pool.tier), pool.name, pool.size_bytes, pool.reason);
  }
  row(name_of(Tier::kNvme), "= sum", placement.nvme_bytes(),
      storage_files_text(placement, config.storage.state.name));
  const auto files = storage_files_of(engine);
  for (const DirectFile& file : files) {
    if (files.size() > 1) row(name_of(Tier::kNvme), "of these", file.size_bytes(), file.name());
  }
  row("-", "activations", activation_bytes, "the application's, beside the budgets");
  // On a GPU, activations are in its memory, not in the host's.
  row("-", "program", memory.beside_bytes - (memory.device_is_host ? activation_bytes : 0),
      "code, libraries, threads");
  row("-", "= sum", memory.sum_bytes(),
      fmt::format("all that is in the host's memory, of {} that {} leaves{}",
                  format_bytes(memory.room_bytes()), memory.room.bound,
                  memory.ranks == 1 ? "" : fmt::format(" each of {} ranks", memory.ranks)));
  return table;
}

std::string bar_line(const StepRecord& record, std::uint64_t steps, double left_s,
                     std::size_t columns) {
  std::string line;
  if (columns >= kBarColumnsLeast) {
    const auto filled = static_cast<int>(kBarWidth * record.step / steps);
    line = fmt::format("[{:#<{}}{:.<{}}] ", "", filled, "", kBarWidth - filled);
  }
  // The important part stands first.
  line += fmt::format("{}/{}  {} left  loss {:.4f}  {}  {:.3f} s/step  r {} w {}  waits {:.3f} s",
                      record.step, steps, duration_text(left_s), record.loss, speed_text(record, 0),
                      record.time_s, format_bytes(record.nvme_read_bytes),
                      format_bytes(record.nvme_write_bytes),
                      static_cast<double>(record.times.exposed_ns()) * 1e-9);
  if (line.size() <= columns) return line;
  const std::size_t whole = line.rfind("  ", columns);  // fields are whole, where one fits
  line.resize(whole == std::string::npos ? columns : whole);
  return line;
}

ProgressDisplay::ProgressDisplay(std::uint64_t steps, bool quiet)
    : steps_(steps), quiet_(quiet), is_terminal_(is_terminal(said_descriptor())) {}

void ProgressDisplay::show(const StepRecord& record) {
  if (quiet_) return;
  if (is_terminal_) return show_bar(record);
  say("step {:>5}/{}  loss {:.4f}  norm {:.3f}  {}  {:.3f} s  read {:>8}  written {:>8}  I/O wait "
      "{:.3f} s  optimizer wait {:.3f} s  hidden {:.0f} %{}\n",
      record.step, steps_, record.loss, record.gradient_norm, speed_text(record, 7), record.time_s,
      format_bytes(record.nvme_read_bytes), format_bytes(record.nvme_write_bytes),
      static_cast<double>(record.times.exposed_io_ns) * 1e-9,
      static_cast<double>(record.times.exposed_optimizer_ns) * 1e-9,
      100 * record.times.hidden_share(),
      record.skipped ? fmt::format("  skipped at loss scale {}", record.loss_scale) : "");
  flush_said();
}

// Training does not wait for a terminal that nothing reads. A launcher that was told to end reads
// no more, and gives its ranks a second to save.
void ProgressDisplay::show_bar(const StepRecord& record) {
  if (!first_)
    first_ = record.step - 1;  // after a resume, the steps before took no time of this run
  if (!takes_output(said_descriptor())) return;
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin_;
  const double left_s = elapsed.count() * static_cast<double>(steps_ - record.step) /
                        static_cast<double>(record.step - *first_);
  // A line that wraps could not be replaced by the next one.
  const int descriptor = said_descriptor();
  show_open_line(descriptor, bar_line(record, steps_, left_s, terminal_columns(descriptor) - 1));
}

void write_json(OutputFile& output, const RunRecord& run) {
  using nlohmann::ordered_json;
  ordered_json document;
  document["parameters"] = run.parameters;
  document["state_bytes"] = run.state_bytes;
  document["optimizer_state"] = name_of(run.optimizer_state);
  document["seed"] = run.seed;
  document["resumed_steps"] = run.resumed_steps.value_or(0);
  document["checkpoints"] = nlohmann::ordered_json::array();
  for (const SavedCheckpoint& saved : run.checkpoints)
    document["checkpoints"].push_back(
        {{"step", saved.step},
         {"path", saved.path},
         {"bytes", saved.size_bytes},
         {"seconds", static_cast<double>(saved.duration_ns) * 1e-9},
         {"blocked_seconds", static_cast<double>(saved.blocked_ns) * 1e-9},
         {"update_wait_seconds", static_cast<double>(saved.update_wait_ns) * 1e-9}});
  document["steps"] = ordered_json::array();
  for (std::size_t place = 0; place < run.steps.size(); ++place) {
    ordered_json figures = json_of(run.steps[place]);
    figures["percent_of_t_min"] = percent_of(run, &StepLimits::least, place);
    figures["percent_of_t_bound"] = percent_of(run, &StepLimits::bound, place);
    document["steps"].push_back(std::move(figures));
  }
  document["limits"] = limits_json(run);
  document["in_memory"] = comparison_json(run);
  document["predicted_nvme_read_bytes"] = run.predicted.nvme_read_bytes;
  document["predicted_gradient_spill_bytes"] = run.predicted.gradient_spill_bytes;
  document["predicted_nvme_read_bytes_least"] = run.predicted.nvme_read_bytes_least;
  document["predicted_nvme_write_bytes"] = run.predicted.nvme_write_bytes;
  document["predicted_activation_out_bytes"] = run.predicted.activation_out_bytes;
  document["predicted_activation_in_bytes"] = run.predicted.activation_in_bytes;
  document["order"] = name_of(run.order);
  document["matrix_products"] = {
      {"library", run.matrix_kernels.library},
      {"kernels", run.matrix_kernels.kernels},
      {"factors", run.matrix_kernels.factors},
      {"table_row", run.table_row.empty() ? ordered_json(nullptr) : ordered_json(run.table_row)},
      {"onednn_percent", share_of(run.matrix_work.onednn, run)},
      {"openblas_percent", share_of(run.matrix_work.openblas, run)},
      {"threads", run.threads},
      {"changes", ordered_json::array()}};
  for (const SettingChange& change : run.kernel_changes)
    document["matrix_products"]["changes"].push_back(
        {{"step", change.steps}, {"was", change.before}, {"is", change.after}});
  document["setting_changes"] = ordered_json::array();
  for (const SettingChange& change : run.setting_changes)
    document["setting_changes"].push_back({{"step", change.steps},
                                           {"key", change.key},
                                           {"was", change.before},
                                           {"is", change.after}});
  document["device_pool_bytes"] = run.device_pool_bytes;
  document["host_pool_bytes"] = run.host_pool_bytes;
  document["activation_bytes"] = run.activation_bytes;
  document["validation_loss"] =
      run.validation_loss ? json_number(*run.validation_loss) : ordered_json(nullptr);
  document["bigram_cross_entropy"] =
      run.bigram_cross_entropy ? json_number(*run.bigram_cross_entropy) : ordered_json(nullptr);
  document["ranks"] = ordered_json::array();
  for (const RankMemory& rank : run.ranks) document["ranks"].push_back(json_of(rank));
  document["peak_rss_bytes"] = peak_rss_bytes();
  document["state_sha256"] =
      run.state_sha256.empty() ? ordered_json(nullptr) : ordered_json(run.state_sha256);
  document["interrupted"] = run.interrupted;
  write_whole(output, json_text(document) + "\n");
}

}  // namespace sluice
