#include "engine/durable/host_findings.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/store/commit_record.h"

namespace sluice {

StoreFinding finding_of_all(const std::string& name, std::span<const HostFinding> findings) {
  const auto is = [](StorePresence presence) {
    return [presence](const HostFinding& one) { return one.found.presence == presence; };
  };
  const auto made = std::ranges::find_if(findings, is(StorePresence::kMade));
  if (made == findings.end()) {
    const auto abandoned = std::ranges::find_if(findings, is(StorePresence::kAbandoned));
    return abandoned == findings.end() ? StoreFinding{} : abandoned->found;
  }
  const auto other = std::ranges::find_if(findings, [&](const HostFinding& one) {
    return one.found.presence == StorePresence::kNone || one.found.id != made->found.id;
  });
  if (other == findings.end()) return made->found;
  const bool is_missing = other->found.presence == StorePresence::kNone;
  throw Error(
      ErrorCode::kInput,
      fmt::format(
          "rank {} on {} has the store \"{}\" ({}), but rank {} on {} has {}; {}, or remove "
          "the store on every host with `sluice state remove`",
          made - findings.begin(), made->host, name, text_of(made->found.id),
          other - findings.begin(), other->host,
          is_missing ? "no file of it"
                     : fmt::format("another one of that name ({})", text_of(other->found.id)),
          is_missing ? "mount the missing path or correct storage.paths there"
                     : "choose another storage.state.name"));
}

}  // namespace sluice
