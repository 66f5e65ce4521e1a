// `sluice top --web` shows what running jobs are doing as a page in a browser.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

// The function serves the page on this machine until Ctrl-C. `folder` has the status pages.
// Fails with the errors of LocalServer.
void show_on_web(const std::string& folder, std::uint16_t port);

}  // namespace sluice
