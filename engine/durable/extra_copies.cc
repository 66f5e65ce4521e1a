#include "engine/durable/extra_copies.h"

#include <algorithm>
#include <exception>
#include <memory>

#include "engine/store/commit_opening.h"
#include "io/io_queue.h"

namespace sluice {

ExtraCopies::ExtraCopies(StoreFiles& files, std::span<const std::uint64_t> data_bytes)
    : files_(files) {
  files_.extend_data(data_bytes);
}

ExtraCopies::~ExtraCopies() {
  try {
    if (!is_named()) files_.cut_data();
  } catch (const std::exception&) {
    // The next opening that wants the copies finds the room, and takes no more.
  }
}

bool ExtraCopies::is_named() const {
  const std::unique_ptr<IoQueue> queue = make_sync_queue({});
  const CommitFiles files = files_.commit_files();
  const CommitOpening opening(*queue, files);
  // A twin that is not whole may be that of a commit whose record was being written.
  if (opening.newest() == nullptr || !opening.choice().mends.empty()) return true;
  const auto names_room = [&](const CommitRecord& record) {
    return std::ranges::any_of(record.planes, [&](const CommitPlane& plane) {
      return std::ranges::any_of(
          std::span(plane.copies).first(plane.copy_count), [&](const CommitExtent& copy) {
            return copy.offset_bytes + plane.length_bytes > files_.former_bytes(copy.file);
          });
    });
  };
  const std::optional<std::uint64_t> older = opening.offer().older;
  return names_room(*opening.newest()) || (older && names_room(opening.of_step(*older)));
}

}  // namespace sluice
