#include "tools/commands/top_command.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
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

// The lines that the terminal has room for, each cut to its width.
std::string screen_of(std::string_view text) {
  const std::size_t columns = terminal_columns(STDOUT_FILENO);
  std::string screen = "\x1b[H\x1b[2J";
  for (std::size_t row = 1; row < terminal_rows() && !text.empty(); ++row) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    screen.append(text.substr(0, std::min(end, columns)));
    screen += "\n";
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return screen;
}

void watch(const std::string& folder) {
  catch_interrupts();
  defer_interrupts("\n");
  std::string ended;  // of processes that went while this was looking: their pages are gone
  while (!interrupted() && said_failure() == 0) {
    const std::vector<FoundPage> pages = read_status_pages(folder);
    std::vector<FoundPage> alive;
    for (const FoundPage& page : pages) {
      if (page.is_alive || !page.status)
        alive.push_back(page);
      else
        ended += status_view({&page, 1}, now_unix_ns());
    }
    const std::string view = status_view(alive, now_unix_ns());
    say_text(screen_of("sluice top, Ctrl-C ends\n" + (view.empty() ? "no run\n" : view) + ended));
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
