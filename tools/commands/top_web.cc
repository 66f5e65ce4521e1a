#include "tools/commands/top_web.h"

#include <chrono>
#include <optional>
#include <string_view>
#include <vector>

#include <sluice/error.h>
#include "engine/run/status_page.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/local_server.h"
#include "tools/cli/print.h"
#include "tools/report/status_text.h"

namespace sluice {

extern const char* const kTopPageText;

namespace {

constexpr int kSignalCheckMs = 500;
constexpr std::size_t kEndedMax = 100;

std::int64_t unix_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// The status pages as JSON. A killed process's page is gone once it was read, so it is kept here.
class RunsReader {
 public:
  explicit RunsReader(std::string folder) : folder_(std::move(folder)) {}

  std::string json() {
    std::vector<FoundPage> shown;
    try {
      for (FoundPage& page : read_status_pages(folder_))
        (page.is_alive || !page.status ? shown : ended_).push_back(std::move(page));
    } catch (const Error& error) {
      shown.push_back({.name = folder_, .problem = error.what(), .status = {}});
    }
    if (ended_.size() > kEndedMax)
      ended_.erase(ended_.begin(), ended_.end() - static_cast<std::ptrdiff_t>(kEndedMax));
    shown.insert(shown.end(), ended_.begin(), ended_.end());
    return status_json(shown, unix_ns());
  }

 private:
  std::string folder_;
  std::vector<FoundPage> ended_;
};

}  // namespace

void show_on_web(const std::string& folder, std::uint16_t port) {
  LocalServer server(port);
  RunsReader runs(folder);
  catch_interrupts();
  defer_interrupts("\n");
  say_text("open " + server.address() + "\n");
  say_text("Only this machine reaches it, and only with this token. Ctrl-C ends it.\n");
  flush_said();
  const auto respond = [&](std::string_view path) -> std::optional<WebAnswer> {
    if (path == "/") return WebAnswer{.type = "text/html", .body = kTopPageText};
    if (path == "/runs") return WebAnswer{.type = "application/json", .body = runs.json()};
    return std::nullopt;
  };
  while (!interrupted()) server.serve(kSignalCheckMs, respond);
}

}  // namespace sluice
