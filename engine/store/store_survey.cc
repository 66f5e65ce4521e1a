#include "engine/store/store_survey.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include "base/aligned_buffer.h"
#include "base/file_flush.h"
#include "engine/store/block_places.h"
#include "engine/store/commit_opening.h"
#include "io/checksum.h"

namespace sluice {
namespace {

constexpr std::string_view kLockSuffix = ".lock";
constexpr std::uint32_t kReaders = 8;  // planes that are read at once
// How long a removal waits for the last transfers of a process that has ended.
constexpr double kUsersWaitSeconds = 120;

StoreFiles::Options options_of(const StoreSurvey& store, std::uint32_t rank) {
  return {.directories = store.directories,
          .name = store.name,
          .id = store.id,
          .rank = rank,
          .access = FileAccess::kRead};
}

SurveyedRank survey_rank(const StoreSurvey& store, std::uint32_t rank) {
  SurveyedRank surveyed{.rank = rank};
  try {
    StoreFiles files = StoreFiles::open_records(options_of(store, rank));
    const CommitFiles records = files.commit_files();
    const std::unique_ptr<IoQueue> queue = make_sync_queue({});
    const CommitOpening opening(*queue, records);
    if (opening.newest() == nullptr)
      throw Error(ErrorCode::kDamaged, fmt::format("no commit in {}", records.twins[0].name));
    surveyed.newest = *opening.newest();
    surveyed.offer = opening.offer();
    if (surveyed.offer.older) surveyed.older = opening.of_step(*surveyed.offer.older);
    try {
      files.open_data(surveyed.newest.file_count);
    } catch (const Error& error) {
      surveyed.data_problem = error.what();
    }
  } catch (const Error& error) {
    surveyed.problem = error.what();
    surveyed.is_damaged = error.code() == ErrorCode::kDamaged;
  }
  return surveyed;
}

// A creation that was cut short before it had any files has made no store.
std::set<StoreId> ids_on(const StorePath& path) {
  std::set<StoreId> ids;
  if (path.mark && path.mark->stage == StoreStage::kMade) ids.insert(path.mark->id);
  for (const StorePath::File& file : path.files) ids.insert(file.id);
  return ids;
}

}  // namespace

std::string store_user(std::span<const StorePath> paths) {
  for (const StorePath& path : paths) {
    for (const StorePath::File& file : path.files) {
      std::string user = file_user(path.directory + "/" + file.name);
      if (!user.empty()) return user;
    }
  }
  return {};
}

std::vector<std::string> store_names(std::span<const std::string> directories) {
  std::set<std::string> names;
  for (const std::string& directory : directories) {
    std::error_code error;
    for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
         entry.increment(error)) {
      const std::string file = entry->path().filename().string();
      if (const auto name = store_of_record(file)) names.insert(*name);
      if (!file.ends_with(kLockSuffix)) continue;
      const std::string name = file.substr(0, file.size() - kLockSuffix.size());
      try {
        if (read_store_mark(directory, name)) names.insert(name);
      } catch (const Error&) {
        // The file belongs to something else.
      }
    }
    if (error)
      throw Error(file_error_code(error.value(), ErrorCode::kInput),
                  fmt::format("cannot look for stores in {}: {}; {}", directory, error.message(),
                              file_remedy(error.value())));
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
  store.lost_marks = found.lost_marks;
  for (const std::string& directory : directories)
    if (const auto holder = store_holder(directory, name)) store.holder = *holder;
  if (store.holder.empty()) store.holder = store_user(paths);
  if (found.presence == StorePresence::kNone) return store;
  for (const StorePath& path : paths) {
    for (const StorePath::File& file : path.files) {
      std::error_code ignored;
      const auto bytes = std::filesystem::file_size(path.directory + "/" + file.name, ignored);
      if (!ignored) store.file_bytes += bytes;
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

std::vector<std::uint32_t> absent_ranks(const StoreSurvey& store) {
  std::set<std::uint32_t> present;
  std::uint32_t count = 0;
  for (const SurveyedRank& rank : store.ranks) {
    present.insert(rank.rank);
    count = std::max(count, rank.newest.rank_count);
  }
  std::vector<std::uint32_t> absent;
  for (std::uint32_t rank = 0; rank < count; ++rank)
    if (!present.contains(rank)) absent.push_back(rank);
  return absent;
}

std::string find_disagreement(const StoreSurvey& store) {
  const bool is_readable = std::ranges::all_of(
      store.ranks, [](const SurveyedRank& rank) { return rank.problem.empty(); });
  if (store.step || store.ranks.empty() || !is_readable) return {};
  std::string steps;
  for (const SurveyedRank& rank : store.ranks)
    steps += fmt::format("{}rank {}: {}{}", steps.empty() ? "" : "; ", rank.rank, rank.newest.step,
                         rank.older ? fmt::format(" or {}", rank.older->step) : "");
  return fmt::format("the ranks have no step in common ({})", steps);
}

std::vector<std::string> find_damaged_planes(const StoreSurvey& store, const SurveyedRank& rank) {
  const CommitRecord& record = rank.of_step(store.step);
  StoreFiles files = StoreFiles::open_records(options_of(store, rank.rank));
  files.open_data(record.file_count);
  std::uint64_t largest = kCommitAlignBytes;
  for (const CommitPlane& plane : record.planes) largest = std::max(largest, plane.length_bytes);
  std::vector<AlignedBuffer> buffers;
  std::vector<std::unique_ptr<IoQueue>> queues;
  while (buffers.size() < kReaders) {
    buffers.emplace_back(largest, "blocks of the store");
    queues.push_back(make_sync_queue({}));
  }
  std::vector<std::string> lines(record.planes.size());
  BlockPlaces places(kReaders);
  for (std::size_t i = 0; i < record.planes.size(); ++i) {
    const auto place = static_cast<std::uint32_t>(i % kReaders);
    places.await(place);
    places.start(place, [&, i, place] {
      lines[i] = read_plane(*queues[place], files, record.planes[i], buffers[place].span());
    });
  }
  places.finish();
  std::erase(lines, std::string());
  return lines;
}

std::string read_plane(IoQueue& queue, const StoreFiles& files, const CommitPlane& plane,
                       std::span<std::byte> buffer) {
  const CommitExtent& place = plane.copies[plane.named_copy];
  const DirectFile& file = files.data()[place.file];
  if (place.offset_bytes + plane.length_bytes > file.size_bytes())
    return fmt::format("{} has {} B, but should reach to {}; it has been truncated", file.name(),
                       file.size_bytes(), place.offset_bytes + plane.length_bytes);
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

// A store that has lost a path, or its marks, can be removed, too: nothing else can be done with
// it.
RemovedStore remove_store(const std::string& name, const std::vector<std::string>& directories) {
  std::vector<StoreLock> locks;
  std::vector<StorePath> paths;
  std::set<StoreId> ids;
  RemovedStore removed;
  for (const std::string& directory : directories) {
    ids.merge(ids_on(look_at_path(directory, name)));
  }
  if (ids.empty())
    throw Error(ErrorCode::kInput,
                fmt::format("there is no store \"{}\" in {}", name, fmt::join(directories, ", ")));
  if (ids.size() > 1) {
    std::vector<std::string> texts;
    for (const StoreId& id : ids) texts.push_back(text_of(id));
    throw Error(
        ErrorCode::kInput,
        fmt::format("{} have files of {} stores \"{}\" ({}); name the paths of one of "
                    "them in storage.paths",
                    fmt::join(directories, ", "), ids.size(), name, fmt::join(texts, ", ")));
  }
  removed.id = *ids.begin();
  for (const std::string& directory : directories) {
    locks.emplace_back(directory, name, "");
    paths.push_back(look_at_path(directory, name));
    // No lock file was made only to look, so the paths were free until now.
    const std::set<StoreId> now = ids_on(paths.back());
    if (now.size() > 1 || (!now.empty() && !now.contains(removed.id)))
      throw Error(ErrorCode::kInput,
                  fmt::format("{} has got another store \"{}\" meanwhile; nothing was removed",
                              directory, name));
    for (const StorePath::File& file : paths.back().files) {
      std::error_code ignored;
      const std::uint64_t bytes = std::filesystem::file_size(directory + "/" + file.name, ignored);
      if (!ignored) removed.file_bytes += bytes;
    }
  }
  FileLocks users(kUsersWaitSeconds);
  await_users(paths, users);
  // From here on, if the removal is interrupted, an opening finds an unfinished store.
  std::vector<StoreMark> marks;
  for (StoreLock& lock : locks) {
    marks.push_back(lock.mark());
    lock.set_mark({.stage = StoreStage::kCreating, .id = removed.id});
  }
  std::size_t count = 0;
  try {
    remove_store_files(paths, removed.id, count);
  } catch (const Error& error) {
    for (std::size_t i = 0; count == 0 && i < locks.size(); ++i) locks[i].set_mark(marks[i]);
    throw Error(error.code(),
                fmt::format("{}; {}", error.what(),
                            count == 0 ? "nothing was removed"
                                       : "some files are removed already, so the store is lost; "
                                         "remove it again"));
  }
  for (StoreLock& lock : locks) lock.set_mark({.stage = StoreStage::kNone, .id = removed.id});
  return removed;
}

}  // namespace sluice
