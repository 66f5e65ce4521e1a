// The report of an import, in words and as JSON.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "tools/deepspeed/deepspeed_import.h"

namespace sluice {
namespace {

std::string told(const ImportLine& line) {
  std::string text = line.key;
  if (!line.value.empty()) text += (text.empty() ? "" : " ") + line.value;
  if (!line.new_key.empty()) text += fmt::format(" -> {} {}", line.new_key, line.new_value);
  if (line.text.empty()) return text;
  return text.empty() ? line.text : text + ": " + line.text;
}

// Where a complaint has a place, it comes first.
std::string complaint(const ImportLine& line) {
  return line.place.empty() ? told(line) : line.place + ": " + told(line);
}

std::string options_hint(const ImportReport& report) {
  if (report.options.empty()) return "";
  return fmt::format("for \"auto\", and for values that a program would set, give: {}\n",
                     fmt::join(report.options, ", "));
}

nlohmann::ordered_json lines_json(const std::vector<ImportLine>& lines) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const ImportLine& line : lines) {
    nlohmann::ordered_json entry = {{"key", line.key}, {"place", line.place}};
    if (!line.value.empty()) entry["value"] = nlohmann::ordered_json::parse(line.value);
    if (!line.new_key.empty()) {
      entry["new_key"] = line.new_key;
      entry["new_value"] = nlohmann::ordered_json::parse(line.new_value);
    }
    entry["text"] = line.text;
    list.push_back(entry);
  }
  return list;
}

}  // namespace

std::string refusals(const ImportReport& report, const std::string& name) {
  std::string text = fmt::format("{}, for {} reason{}:\n",
                                 name +
                                     " is a DeepSpeed file that is "
                                     "refused",
                                 report.refused.size(), report.refused.size() == 1 ? "" : "s");
  for (const ImportLine& line : report.refused) text += "  " + complaint(line) + "\n";
  text += options_hint(report);
  text.pop_back();
  return text;
}

std::string summary_of(const ImportReport& report, const std::string& name) {
  return fmt::format(
      "{} is a DeepSpeed file: {} values mapped, {} not needed, {} understood, {}", name,
      report.mapped.size(), report.not_needed.size(), report.understood.size(),
      report.refused.empty() ? "none refused" : fmt::format("{} refused", report.refused.size()));
}

std::string describe(const ImportReport& report, const std::string& name) {
  std::string text = summary_of(report, name) + "\n";
  const auto add = [&text](const char* title, const std::vector<ImportLine>& lines, auto&& line) {
    if (lines.empty()) return;
    text += fmt::format("\n{}\n", title);
    for (const ImportLine& entry : lines) text += "  " + line(entry) + "\n";
  };
  add("mapped", report.mapped, told);
  add("not needed", report.not_needed, told);
  add("understood, though written otherwise", report.understood, complaint);
  add("refused", report.refused, complaint);
  return text + options_hint(report);
}

std::string report_json(const ImportedConfig& imported, const std::string& name) {
  const ImportReport& report = imported.report;
  const nlohmann::ordered_json document = {
      {"file", name},
      {"mapped", lines_json(report.mapped)},
      {"not_needed", lines_json(report.not_needed)},
      {"understood", lines_json(report.understood)},
      {"refused", lines_json(report.refused)},
      {"options", report.options},
      {"config", nlohmann::ordered_json::parse(imported.config)}};
  // The file's name may be no UTF-8, which JSON has to be.
  return document.dump(2, ' ', /*ensure_ascii=*/false,
                       nlohmann::ordered_json::error_handler_t::replace) +
         "\n";
}

}  // namespace sluice
