// `sluice top` has three kinds of output about status pages (status_page.h): a view for people,
// JSON, and text for Prometheus.
// Thread rule: any thread. The functions are pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "engine/run/status_page.h"

namespace sluice {

// `now_unix_ns` is the current time. The view shows the age of each page at the current time.
std::string status_view(std::span<const FoundPage> pages, std::int64_t now_unix_ns);
// Returns a text of the form {"runs": [...], "ended": [...], "problems": [...]} (docs/cli.md).
std::string status_json(std::span<const FoundPage> pages, std::int64_t now_unix_ns);
// Returns a text in version 0.0.4 of Prometheus's text format. The text does not contain processes
// that have ended.
std::string status_prometheus(std::span<const FoundPage> pages, std::int64_t now_unix_ns);

}  // namespace sluice
