#include "engine/store/store_survey.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/store/commit_opening.h"
#include "io/checksum.h"

namespace sluice {
namespace {

constexpr std::string_view kLockSuffix = ".lock";

StoreFiles::Options options_of(const StoreSurvey& store, std::uint32_t rank) {
  return {.directories = store.directories, .name = store.name, .id = store.id, .rank = rank};
}

SurveyedRank survey_rank(const StoreSurvey& store, std::uint32_t rank) {
  SurveyedRank surveyed{.rank = rank};
  try {
    const StoreFiles files = StoreFiles::open_records(options_of(store, rank));
    const CommitFiles records = files.commit_files();
    const std::unique_ptr<IoQueue> queue = make_sync_queue({});
    const CommitOpening opening(*queue, records);
    if (opening.newest() == nullptr)
      throw Error(ErrorCode::kDamaged, fmt::format("no commit in {}", records.twins[0].name));
    surveyed.newest = *opening.newest();
    surveyed.offer = opening.offer();
  } catch (const Error& error) {
    surveyed.problem = error.what();
  }
  return surveyed;
}

}  // namespace

std::vector<std::string> store_names(std::span<const std::string> directories) {
  std::set<std::string> names;
  for (const std::string& directory : directories) {
    std::error_code error;
    for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
         entry.increment(error)) {
      const std::string file = entry->path().filename().string();
      if (!file.ends_with(kLockSuffix)) continue;
      const std::string name = file.substr(0, file.size() - kLockSuffix.size());
      try {
        if (read_store_mark(directory, name)) names.insert(name);
      } catch (const Error&) {
        // The file belongs to something else.
      }
    }
    if (error)
      throw Error(ErrorCode::kInput,
                  fmt::format("cannot look for stores in {}: {}", directory, error.message()));
  }
  return {names.begin(), names.end()};
}

StoreSurvey survey_store(const std::string& name, const std::vector<std::string>& directories) {
  StoreSurvey store{.name = name, .directories = directories};
  std::vector<StorePath> paths;
  for (const std::string& directory : directories) paths.push_back(look_at_path(directory, name));
  const StoreFinding found = find_store(name, paths);
  store.presence = found.presence;
  store.id = found.id;
  for (const std::string& directory : directories)
    if (const auto holder = store_holder(directory, name)) store.holder = *holder;
  if (found.presence == StorePresence::kNone) return store;
  for (const StorePath& path : paths) {
    for (const StorePath::File& file : path.files) {
      std::error_code ignored;
      store.file_bytes += std::filesystem::file_size(path.directory + "/" + file.name, ignored);
    }
  }
  std::vector<CommitOffer> offers;
  for (const std::uint32_t rank : ranks_on(paths)) {
    store.ranks.push_back(survey_rank(store, rank));
    offers.push_back(store.ranks.back().offer);
  }
  if (!offers.empty()) store.step = common_step(offers);
  return store;
}

std::vector<std::string> find_damaged_planes(const StoreSurvey& store, const SurveyedRank& rank) {
  StoreFiles files = StoreFiles::open_records(options_of(store, rank.rank));
  files.open_data(rank.newest.file_count);
  std::uint64_t largest = kCommitAlignBytes;
  for (const CommitPlane& plane : rank.newest.planes)
    largest = std::max(largest, plane.length_bytes);
  const AlignedBuffer buffer(largest, "a block of the store");
  const std::unique_ptr<IoQueue> queue = make_sync_queue({});
  std::vector<std::string> lines;
  for (const CommitPlane& plane : rank.newest.planes) {
    std::string damage = read_plane(*queue, files, plane, buffer.span());
    if (!damage.empty()) lines.push_back(std::move(damage));
  }
  return lines;
}

std::string read_plane(IoQueue& queue, const StoreFiles& files, const CommitPlane& plane,
                       std::span<std::byte> buffer) {
  const CommitExtent& place = plane.copies[plane.named_copy];
  const DirectFile& file = files.data()[place.file];
  IoRequest request{.kind = IoKind::kRead,
                    .descriptor = file.descriptor(),
                    .offset_bytes = place.offset_bytes,
                    .data = buffer.data(),
                    .length_bytes = plane.length_bytes,
                    .on_complete = [](IoRequest&) {}};
  IoRequest* const pointer = &request;
  queue.submit({&pointer, 1});
  queue.wait_idle();
  const std::string where =
      fmt::format("{} [{}, +{})", file.name(), place.offset_bytes, plane.length_bytes);
  if (request.error != 0) return fmt::format("{}: {}", where, errno_text(request.error));
  const std::uint64_t found = checksum(buffer.first(plane.length_bytes));
  if (found == plane.checksum) return {};
  return fmt::format("{}: checksum {:016x} of update {}, found {:016x}", where, plane.checksum,
                     plane.version, found);
}

std::uint64_t remove_store(const StoreSurvey& store) {
  std::vector<StoreLock> locks;
  std::vector<StorePath> paths;
  for (const std::string& directory : store.directories) {
    locks.emplace_back(directory, store.name, "");
    paths.push_back(look_at_path(directory, store.name));
  }
  // From here on, if the removal is interrupted, an opening finds an unfinished store.
  for (StoreLock& lock : locks) lock.set_mark({.stage = StoreStage::kCreating, .id = store.id});
  remove_store_files(paths, store.id);
  for (StoreLock& lock : locks) lock.set_mark({.stage = StoreStage::kNone, .id = store.id});
  return store.file_bytes;
}

}  // namespace sluice
