// Charts as SVG files. A chart has bars or lines, a legend, values as text, and a description for
// screen readers. Equal charts give equal files, byte for byte.
// Thread rule: any thread. The functions are pure.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

struct ChartBar {
  double value = 0;
  double low = 0;  // the spread, drawn as a line; no line if `low` and `high` are 0
  double high = 0;
};

// Rows of bars. Each row has one bar for each series, and these bars stand side by side.
struct BarChart {
  struct Row {
    std::string label = {};
    std::vector<std::optional<ChartBar>> bars = {};  // one per series; nothing = not measured
  };
  std::string title = {};
  std::string unit = {};
  std::vector<std::string> series = {};
  std::vector<Row> rows = {};
};

// The chart has lines over one horizontal axis. The axis is logarithmic. While the mouse pointer is
// on a point of a line, the chart shows the text of this point.
struct LineChart {
  struct Line {
    std::string name = {};
    std::vector<double> values = {};  // one value per place
    bool is_main = false;             // drawn thick and black
  };
  // A vertical line at one value of the axis.
  struct Mark {
    double at = 0;
    std::string text = {};
  };
  std::string title = {};
  std::string x_name = {};
  std::string y_name = {};
  std::vector<double> places = {};  // positive, ascending
  std::vector<std::string> place_texts = {};
  std::vector<Line> lines = {};
  std::vector<Mark> marks = {};
};

// Returns `text` as it has to stand in SVG, XML and HTML. Bytes that are not UTF-8, and control
// characters that XML does not have, become U+FFFD.
std::string escaped_markup(std::string_view text);

// Requires: each row has as many bars as there are series, and there is at least one row.
std::string svg_of(const BarChart& chart);
// Requires: each line has one value for each element of `places`, and `places` is not empty.
std::string svg_of(const LineChart& chart);

}  // namespace sluice
