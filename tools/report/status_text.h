// The output of `sluice top` about status pages (status_page.h). There is a view for people, JSON,
// and text for Prometheus. Thread rule: pure; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "engine/run/status_page.h"

namespace sluice {

// `now_unix_ns` is the current time, from which ages are computed.
std::string status_view(std::span<const FoundPage> pages, std::int64_t now_unix_ns);
// The text is {"runs": [...], "ended": [...], "problems": [...]} (docs/cli.md).
std::string status_json(std::span<const FoundPage> pages, std::int64_t now_unix_ns);
// The text format 0.0.4. Processes that are gone are left out.
std::string status_prometheus(std::span<const FoundPage> pages, std::int64_t now_unix_ns);

}  // namespace sluice
