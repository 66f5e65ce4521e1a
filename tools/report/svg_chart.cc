#include "tools/report/svg_chart.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "base/utf8.h"

namespace sluice {
namespace {

// Each differs from white by at least 4.5 to 1 (WCAG), and lines differ in their dashes, too.
constexpr std::array kColours{"#0b5fa5", "#a3470c", "#1b7340", "#8a2a80", "#5d636b", "#7a5a00"};
constexpr std::array kDashes{"", "7 3", "2 3", "9 3 2 3", "12 4", "4 4"};
constexpr double kWidth = 760;
constexpr double kLabelWidth = 210;
constexpr double kValueWidth = 120;  // right of the longest bar
constexpr double kBarHeight = 16;
constexpr double kLegendLine = 18;

std::string text_at(double x, double y, std::string_view anchor, std::string_view text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     escaped_markup(text));
}

std::string line_between(double x1, double y1, double x2, double y2, std::string_view style) {
  return fmt::format(
      "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" style=\"{}\"/>\n", x1, y1, x2,
      y2, style);
}

// The whole file. `description` tells a screen reader what the figure shows.
std::string document(double height, std::string_view title, std::string_view description,
                     std::string_view body) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" "
      "height=\"{1:.0f}\" role=\"img\" aria-label=\"{2}\" "
      "font-family=\"sans-serif\" font-size=\"12\" fill=\"#1a1c20\">\n"
      "<title>{2}</title>\n<desc>{3}</desc>\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
      "<text x=\"{4:.1f}\" y=\"22\" text-anchor=\"middle\" "
      "font-size=\"14\">{2}</text>\n{5}</svg>\n",
      kWidth, height, escaped_markup(title), escaped_markup(description), kWidth / 2, body);
}

// The least of 1, 2 and 5 times a power of ten that divides `most` into at most five parts.
double tick_of(double most) {
  const double part = most / 5;
  const double power = std::pow(10, std::floor(std::log10(part)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * power >= part) return factor * power;
  return 10 * power;
}

double above_zero(double most) {
  return most > 0 && std::isfinite(most) ? most : 1;
}

// One name per line, below the title.
std::string legend(const std::vector<std::string>& names, const auto& sample) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const double y = 44 + kLegendLine * static_cast<double>(i);
    text += sample(i, y) + text_at(kLabelWidth + 34, y, "start", names[i]);
  }
  return text;
}

std::string bar_text(const BarChart& chart, const ChartBar& bar) {
  std::string text = fmt::format("{:.4g} {}", bar.value, chart.unit);
  if (bar.low != 0 || bar.high != 0) text += fmt::format(" [{:.4g}, {:.4g}]", bar.low, bar.high);
  return text;
}

// Lines of a chart by places and values.
struct Frame {
  double left = 70, right = kWidth - 24, top = 0, bottom = 0;
  double first = 1, last = 1, most = 1;

  double x(double place) const {
    const double range = std::log(last / first);
    return range <= 0 ? (left + right) / 2
                      : left + (right - left) * std::log(place / first) / range;
  }
  double y(double value) const { return bottom - (bottom - top) * value / most; }
};

std::string axes_of(const LineChart& chart, const Frame& frame) {
  std::string body;
  for (double value = 0; value <= 1.0001 * frame.most; value += tick_of(frame.most)) {
    body += line_between(frame.left, frame.y(value), frame.right, frame.y(value),
                         "stroke:#c4c8ce;stroke-width:1");
    body += text_at(frame.left - 6, frame.y(value) + 4, "end", fmt::format("{:g}", value));
  }
  // The first, the last, and those between that have room.
  double taken = frame.left - 200;
  for (std::size_t i = 0; i < chart.places.size(); ++i) {
    const double x = frame.x(chart.places[i]);
    const bool is_last = i + 1 == chart.places.size();
    if (x < taken + 90 || (!is_last && x > frame.right - 90)) continue;
    body += text_at(x, frame.bottom + 18, is_last ? "end" : "middle", chart.place_texts[i]);
    taken = x;
  }
  body += text_at((frame.left + frame.right) / 2, frame.bottom + 38, "middle", chart.x_name);
  return body + text_at(frame.left - 50, frame.top - 10, "start", chart.y_name);
}

std::string lines_of(const LineChart& chart, const Frame& frame) {
  std::string body;
  for (std::size_t i = 0; i < chart.lines.size(); ++i) {
    const LineChart::Line& line = chart.lines[i];
    const std::string_view colour = line.is_main ? "#1a1c20" : kColours[i % kColours.size()];
    std::string points, dots;
    for (std::size_t at = 0; at < line.values.size(); ++at) {
      const double x = frame.x(chart.places[at]), y = frame.y(line.values[at]);
      points += fmt::format("{:.1f},{:.1f} ", x, y);
      dots += fmt::format(
          "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" fill=\"{}\" "
          "data-place=\"{:.0f}\"><title>{}: {} {:.6g} {}</title></circle>\n",
          x, y, line.is_main ? 3.5 : 2.5, colour, chart.places[at],
          escaped_markup(chart.place_texts[at]), escaped_markup(line.name), line.values[at],
          escaped_markup(chart.y_name));
    }
    body += fmt::format(
        "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" stroke-dasharray=\"{}\" "
        "points=\"{}\"/>\n{}",
        colour, line.is_main ? 3 : 1.8, line.is_main ? "" : kDashes[i % kDashes.size()], points,
        dots);
  }
  return body;
}

}  // namespace

std::string escaped_markup(std::string_view text) {
  std::string result;
  for (const char letter : valid_utf8(text)) {
    const bool is_control = static_cast<unsigned char>(letter) < 0x20;
    switch (letter) {
      case '&': result += "&amp;"; break;
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '"': result += "&quot;"; break;
      case '\t':
      case '\n':
      case '\r': result += letter; break;
      default: result += is_control ? "\uFFFD" : std::string(1, letter);
    }
  }
  return result;
}

std::string svg_of(const BarChart& chart) {
  double most = 0;
  for (const BarChart::Row& row : chart.rows)
    for (const auto& bar : row.bars)
      if (bar) most = std::max({most, bar->value, bar->high});
  const double scale = (kWidth - kLabelWidth - kValueWidth) / above_zero(most);
  const auto count = static_cast<double>(chart.series.size());
  const double row_height = kBarHeight * count + 8;
  const bool has_legend = chart.series.size() > 1;
  double top = 40 + (has_legend ? kLegendLine * count + 4 : 0);
  std::string body, description = chart.unit + ". ";
  if (has_legend)
    body += legend(chart.series, [](std::size_t i, double y) {
      return fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"22\" height=\"11\" fill=\"{}\"/>\n",
          kLabelWidth + 6, y - 10, kColours[i % kColours.size()]);
    });
  for (const BarChart::Row& row : chart.rows) {
    body += text_at(kLabelWidth - 8, top + row_height / 2, "end", row.label);
    for (std::size_t i = 0; i < row.bars.size(); ++i) {
      const double y = top + kBarHeight * static_cast<double>(i);
      if (!row.bars[i]) continue;
      const ChartBar& bar = *row.bars[i];
      const std::string text = bar_text(chart, bar);
      const std::string whole = fmt::format("{}, {}: {}", row.label, chart.series[i], text);
      description += whole + ". ";
      body += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
          "fill=\"{}\"><title>{}</title></rect>\n",
          kLabelWidth, y, std::max(0.0, bar.value * scale), kBarHeight - 3,
          kColours[i % kColours.size()], escaped_markup(whole));
      if (bar.low != 0 || bar.high != 0)
        body += line_between(kLabelWidth + bar.low * scale, y + 6.5, kLabelWidth + bar.high * scale,
                             y + 6.5, "stroke:#1a1c20;stroke-width:2");
      body += text_at(kLabelWidth + std::max(bar.value, bar.high) * scale + 5, y + 11, "start",
                      fmt::format("{:.4g}", bar.value));
    }
    top += row_height;
  }
  body += text_at((kLabelWidth + kWidth - kValueWidth) / 2, top + 14, "middle", chart.unit);
  return document(top + 28, chart.title, description, body);
}

std::string svg_of(const LineChart& chart) {
  Frame frame;
  frame.first = chart.places.front();
  frame.last = chart.places.back();
  double most = 0;
  for (const LineChart::Line& line : chart.lines)
    for (const double value : line.values) most = std::max(most, value);
  most = above_zero(most);
  frame.most = std::ceil(most / tick_of(most)) * tick_of(most);
  std::vector<std::string> names;
  for (const LineChart::Line& line : chart.lines) names.push_back(line.name);
  frame.top = 60 + kLegendLine * static_cast<double>(names.size() + chart.marks.size());
  frame.bottom = frame.top + 300;
  std::string body = legend(names, [&](std::size_t i, double y) {
    const bool is_main = chart.lines[i].is_main;
    return line_between(
        kLabelWidth + 2, y - 4, kLabelWidth + 28, y - 4,
        fmt::format("stroke:{};stroke-width:{};stroke-dasharray:{}",
                    is_main ? "#1a1c20" : kColours[i % kColours.size()], is_main ? 3 : 1.8,
                    is_main ? "none" : kDashes[i % kDashes.size()]));
  });
  body += axes_of(chart, frame);
  std::string description;
  for (std::size_t i = 0; i < chart.marks.size(); ++i) {
    const double x = frame.x(std::clamp(chart.marks[i].at, frame.first, frame.last));
    const double y = 44 + kLegendLine * static_cast<double>(names.size() + i);
    description += chart.marks[i].text + ". ";
    body += line_between(
        x, frame.top, x, frame.bottom,
        fmt::format("stroke:#1a1c20;stroke-width:1;stroke-dasharray:{}", i == 0 ? "3 3" : "8 3"));
    body += text_at(kLabelWidth + 34, y, "start",
                    fmt::format("{} {}", i == 0 ? "┆" : "╎", chart.marks[i].text));
  }
  for (const LineChart::Line& line : chart.lines)
    description +=
        fmt::format("{}: {:.4g} at {}, {:.4g} at {}. ", line.name, line.values.front(),
                    chart.place_texts.front(), line.values.back(), chart.place_texts.back());
  body += lines_of(chart, frame);
  return document(frame.bottom + 52, chart.title, description, body);
}

}  // namespace sluice
