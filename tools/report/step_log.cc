#include "tools/report/step_log.h"

#include <charconv>
#include <cmath>
#include <fstream>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/untrusted_json.h"
#include "tools/cli/print.h"

namespace sluice {
namespace {

constexpr const char* kCsvHeader =
    "step,loss,gradient_norm,time_s,tokens,nvme_read_bytes,nvme_write_bytes,gathered_bytes,"
    "reduced_bytes,stall_s,stall_for_update_s,optimizer_s,compute_s,exposed_io_s,"
    "exposed_optimizer_s,other_s,hidden_share,policy,activation_out_bytes,activation_in_bytes,"
    "loss_scale,skipped,crossed_bytes,tokens_per_s,flops_per_s,mfu,validation_loss,"
    "copied_parameter_bytes,copied_gradient_bytes,copied_update_bytes\n";

double logged_seconds(std::int64_t duration_ns) {
  return static_cast<double>(duration_ns) * 1e-9;
}

// Empty where there is no value.
std::string csv_text(const std::optional<double>& value) {
  return value ? fmt::format("{}", *value) : std::string();
}

std::string csv_row(const StepRecord& step) {
  return fmt::format(
      "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{:d},"
      "{},{},{},{},{},{},{},{}\n",
      step.step, step.loss, step.gradient_norm, step.time_s, step.tokens, step.nvme_read_bytes,
      step.nvme_write_bytes, step.rank_traffic.gathered_bytes, step.rank_traffic.reduced_bytes,
      step.stall_s, step.stall_for_update_s, step.optimizer_s,
      logged_seconds(step.times.compute_ns), logged_seconds(step.times.exposed_io_ns),
      logged_seconds(step.times.exposed_optimizer_ns), logged_seconds(step.times.other_ns),
      step.times.hidden_share(), name_of(step.policy), step.activation_out_bytes,
      step.activation_in_bytes, step.loss_scale, step.skipped, step.rank_traffic.crossed_bytes,
      step.tokens_per_s(), step.flops_per_s(), csv_text(step.mfu()), csv_text(step.validation_loss),
      step.copies.parameter_bytes, step.copies.gradient_bytes, step.copies.update_bytes);
}

// The whole rows, of these steps, in the file that is about to be replaced.
template <class StepOf>
std::string kept_rows(const OutputFile& output, std::uint64_t steps, const StepOf& step_of) {
  if (steps == 0 || !output.is_wanted() || !output.is_regular()) return {};
  std::ifstream file(output.path());
  std::string kept;
  for (std::string row; std::getline(file, row) && !file.eof();) {
    const std::string text = step_of(row);
    std::uint64_t step = 0;
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), step);
    if (parsed.ec == std::errc{} && step != 0 && step <= steps) kept += row + "\n";
  }
  return kept;
}

}  // namespace

nlohmann::ordered_json json_number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

nlohmann::ordered_json json_number(const std::optional<double>& value) {
  return value ? json_number(*value) : nlohmann::ordered_json(nullptr);
}

nlohmann::ordered_json json_of(const StepRecord& step) {
  return {{"step", step.step},
          {"loss", json_number(step.loss)},
          {"gradient_norm", json_number(step.gradient_norm)},
          {"loss_scale", step.loss_scale},
          {"skipped", step.skipped},
          {"time_s", step.time_s},
          {"tokens", step.tokens},
          {"tokens_per_s", step.tokens_per_s()},
          {"flops_per_s", step.flops_per_s()},
          {"mfu", json_number(step.mfu())},
          {"validation_loss", json_number(step.validation_loss)},
          {"nvme_read_bytes", step.nvme_read_bytes},
          {"nvme_write_bytes", step.nvme_write_bytes},
          {"gathered_bytes", step.rank_traffic.gathered_bytes},
          {"reduced_bytes", step.rank_traffic.reduced_bytes},
          {"crossed_bytes", step.rank_traffic.crossed_bytes},
          {"stall_s", step.stall_s},
          {"stall_for_update_s", step.stall_for_update_s},
          {"optimizer_s", step.optimizer_s},
          {"compute_s", logged_seconds(step.times.compute_ns)},
          {"exposed_io_s", logged_seconds(step.times.exposed_io_ns)},
          {"exposed_optimizer_s", logged_seconds(step.times.exposed_optimizer_ns)},
          {"other_s", logged_seconds(step.times.other_ns)},
          {"hidden_share", step.times.hidden_share()},
          {"policy", name_of(step.policy)},
          {"activation_out_bytes", step.activation_out_bytes},
          {"activation_in_bytes", step.activation_in_bytes},
          {"copied_parameter_bytes", step.copies.parameter_bytes},
          {"copied_gradient_bytes", step.copies.gradient_bytes},
          {"copied_update_bytes", step.copies.update_bytes}};
}

StepLog::StepLog(OutputFile& csv, OutputFile& json_lines, std::uint64_t every)
    : every_(every),
      csv_{.file = csv, .failure = {}},
      json_lines_{.file = json_lines, .failure = {}} {}

void StepLog::begin(std::uint64_t steps_before) {
  const std::string rows = kept_rows(
      csv_.file, steps_before, [](const std::string& row) { return row.substr(0, row.find(',')); });
  const std::string lines = kept_rows(json_lines_.file, steps_before, [](const std::string& row) {
    const auto step = parse_untrusted_json<nlohmann::json>(row);
    return step.is_object() ? step.value("step", nlohmann::json()).dump() : "";
  });
  csv_.file.write(kCsvHeader + rows);
  json_lines_.file.begin();
  json_lines_.file.write(lines);
}

void StepLog::accept() noexcept {
  csv_.file.accept();
  json_lines_.file.accept();
}

void StepLog::add(const StepRecord& step) {
  pending_ = step;
  if (is_due(step) || step.validation_loss) write(step);
}

void StepLog::write(const StepRecord& step) {
  if (csv_.file.is_wanted()) append(csv_, csv_row(step));
  if (json_lines_.file.is_wanted()) append(json_lines_, json_of(step).dump() + "\n");
  pending_.reset();
}

void StepLog::append(Rows& rows, const std::string& text) {
  if (rows.failure != nullptr) return;
  try {
    rows.file.write(text);
  } catch (const std::exception& error) {
    rows.failure = std::current_exception();
    warn("sluice: {}; training goes on\n", error.what());
  }
}

void StepLog::finish_csv() {
  finish(csv_);
}

void StepLog::finish_json_lines() {
  finish(json_lines_);
}

void StepLog::finish(Rows& rows) {
  if (pending_) write(*pending_);
  if (rows.failure != nullptr) std::rethrow_exception(rows.failure);
  rows.file.commit();
}

}  // namespace sluice
