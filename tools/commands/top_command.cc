#include "tools/commands/top_command.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/run/status_page.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/top_web.h"
#include "tools/report/status_text.h"

namespace sluice {
namespace {

constexpr int kRefreshMs = 1000;
constexpr std::size_t kEndedShown = 3;
constexpr std::size_t kRows = 24;  // where the terminal does not tell

std::int64_t now_unix_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::size_t terminal_rows() {
  winsize size{};
  const bool is_known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row != 0;
  return is_known ? size.ws_row : kRows;
}

// The lines that the terminal has room for, each cut to its width. The last one says how many lines
// are left out.
std::string screen_of(std::string_view text) {
  const std::size_t columns = terminal_columns(STDOUT_FILENO);
  std::string screen = "\x1b[H\x1b[2J";
  const std::size_t rows = std::max<std::size_t>(terminal_rows(), 2) - 1;
  const auto lines = static_cast<std::size_t>(std::ranges::count(text, '\n'));
  for (std::size_t shown = 0; shown < lines; ++shown) {
    if (shown + 1 == rows && lines > rows) {
      const std::string rest =
          fmt::format("... and {} more lines; --once shows all", lines - shown);
      return screen.append(first_columns(rest, columns)) + "\n";
    }
    const std::size_t end = text.find('\n');
    screen.append(first_columns(text.substr(0, end), columns)) += "\n";
    text.remove_prefix(end + 1);
  }
  return screen;
}

void watch(const std::string& folder) {
  catch_interrupts();
  defer_interrupts("\n");
  std::deque<FoundPage> ended;  // while this was looking, the newest first: their pages are gone
  while (!interrupted() && said_failure() == 0) {
    const std::vector<FoundPage> pages = read_status_pages(folder);
    std::vector<FoundPage> alive;
    for (const FoundPage& page : pages) {
      if (page.is_alive || !page.status)
        alive.push_back(page);
      else
        ended.push_front(page);
    }
    if (ended.size() > kEndedShown) ended.resize(kEndedShown);
    std::string text = "sluice top, Ctrl-C ends\n";
    for (const FoundPage& page : ended) text += status_view({&page, 1}, now_unix_ns());
    text += alive.empty() ? "no run\n" : status_view(alive, now_unix_ns());
    say_text(screen_of(text));
    flush_said();
    (void)::poll(nullptr, 0, kRefreshMs);  // a signal ends it
  }
}

}  // namespace

int run_top(const TopOptions& options) {
  const std::string folder = status_folder();
  if (folder.empty())
    throw Error(ErrorCode::kConfig,
                "XDG_RUNTIME_DIR is not set, so runs have no status pages; set it to a folder of "
                "your own, for the runs and for `sluice top`");
  if (options.on_web) {
    show_on_web(folder, options.port);
    return kExitOk;
  }
  const bool is_once = options.once || options.as_json || options.as_prometheus;
  if (!is_once && is_terminal(STDOUT_FILENO)) {
    watch(folder);
    return kExitOk;
  }
  const std::vector<FoundPage> pages = read_status_pages(folder);
  if (options.as_json)
    say_text(status_json(pages, now_unix_ns()));
  else if (options.as_prometheus)
    say_text(status_prometheus(pages, now_unix_ns()));
  else if (pages.empty())
    say("no run has a status page in {}\n", folder);
  else
    say("{}", status_view(pages, now_unix_ns()));
  return kExitOk;
}

}  // namespace sluice
