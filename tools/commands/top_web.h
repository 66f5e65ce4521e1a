// `sluice top --web` shows a page in a browser. The page shows the present work of all jobs that
// are running.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

// Serves the page to browsers on this machine, until Ctrl-C. `folder` contains the status pages of
// the jobs.
// Fails with the errors of LocalServer.
void show_on_web(const std::string& folder, std::uint16_t port);

}  // namespace sluice
