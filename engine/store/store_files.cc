#include "engine/store/store_files.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include "base/file_flush.h"
#include "engine/store/commit_choice.h"
#include "engine/store/commit_format.h"
#include "engine/store/commit_opening.h"

namespace sluice {
namespace {

constexpr const char* kData = "data";
constexpr const char* kRecords = "commit";
// No other process can have opened a file without a name.
constexpr double kNoWaitSeconds = 1;

// NAME.ID.rest -> ID
std::optional<StoreId> id_in(const std::string& file, const std::string& name) {
  StoreId id{};
  const std::size_t begin = name.size() + 1;
  if (!file.starts_with(name + ".") || file.size() < begin + 2 * id.size() + 1 ||
      file[begin + 2 * id.size()] != '.')
    return std::nullopt;
  for (std::size_t i = 0; i < id.size(); ++i) {
    const std::string digits = file.substr(begin + 2 * i, 2);
    const auto digit = [](char c) {
      return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    };
    if (digit(digits[0]) < 0 || digit(digits[1]) < 0) return std::nullopt;
    id[i] = static_cast<std::uint8_t>(digit(digits[0]) * 16 + digit(digits[1]));
  }
  return id;
}

// NAME.ID.rRANK.commit0 -> RANK
std::optional<std::uint32_t> rank_of(const std::string& file) {
  constexpr std::string_view kTail = ".commit0";
  if (!file.ends_with(kTail)) return std::nullopt;
  const std::size_t end = file.size() - kTail.size();
  const std::size_t begin = file.rfind(".r", end);
  if (begin == std::string::npos) return std::nullopt;
  std::uint32_t rank = 0;
  const char* const last = file.data() + end;
  if (std::from_chars(file.data() + begin + 2, last, rank).ptr != last) return std::nullopt;
  return rank;
}

// Whether rank 0 has a commit, and its files are there.
bool has_commit(const std::string& name, const StoreId& id, std::span<const StorePath> paths) {
  StoreFiles::Options options{
      .directories = {}, .name = name, .id = id, .rank = 0, .access = FileAccess::kRead};
  for (const StorePath& path : paths) options.directories.push_back(path.directory);
  try {
    StoreFiles files = StoreFiles::open_records(options);
    const CommitFiles records = files.commit_files();
    const std::unique_ptr<IoQueue> queue = make_sync_queue({});
    const CommitOpening opening(*queue, records);
    if (opening.newest() == nullptr || opening.newest()->store_id != id) return false;
    files.open_data(opening.newest()->file_count);
    return true;
  } catch (const Error&) {
    return false;
  }
}

void sync_folder(const std::string& directory) {
  if (const int error = flush_folder(directory); error != 0)
    throw Error(file_error_code(error, ErrorCode::kIo),
                fmt::format("cannot make the names in {} durable: {}; {}", directory,
                            errno_text(error), file_remedy(error)));
}

[[noreturn]] void throw_unremoved(const std::string& file, int error) {
  throw Error(file_error_code(error, ErrorCode::kIo),
              fmt::format("cannot remove {}: {}; {}", file, errno_text(error), file_remedy(error)));
}

[[noreturn]] void throw_incomplete(const std::string& name, const StoreId& id,
                                   const StorePath& path, const char* what) {
  throw Error(ErrorCode::kInput,
              fmt::format("store \"{}\" ({}) exists, but {} {}; mount the missing path, correct "
                          "storage.paths, or remove the store with `sluice state remove`",
                          name, text_of(id), path.directory, what));
}

}  // namespace

StorePath look_at_path(const std::string& directory, const std::string& name) {
  StorePath path{.directory = directory, .mark = {}, .files = {}};
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string file = entry->path().filename().string();
    if (const auto id = id_in(file, name)) path.files.push_back({file, *id});
  }
  if (error) {
    const ErrorCode code = file_error_code(error.value(), ErrorCode::kInput);
    throw Error(code,
                fmt::format("cannot look for a store in {}: {}; {}", directory, error.message(),
                            code == ErrorCode::kInput ? "correct storage.paths"
                                                      : file_remedy(error.value())));
  }
  std::ranges::sort(path.files, {}, &StorePath::File::name);
  try {
    path.mark = read_store_mark(directory, name);
  } catch (const Error& damage) {
    if (damage.code() != ErrorCode::kDamaged || path.files.empty()) throw;
  }
  return path;
}

StoreFinding find_store(const std::string& name, std::span<const StorePath> paths) {
  const bool is_made = std::ranges::any_of(paths, [](const StorePath& path) {
    return path.mark && path.mark->stage == StoreStage::kMade;
  });
  const bool has_files =
      std::ranges::any_of(paths, [](const StorePath& path) { return !path.files.empty(); });
  // Data files come after every path's mark: without any, there is no store, whatever the marks of
  // creations that were cut short say.
  if (!is_made && !has_files) return {};
  std::optional<StoreId> id;
  const auto meet = [&](const StoreId& met, const StorePath& path) {
    if (!id) id = met;
    if (*id != met) throw_incomplete(name, *id, path, "has another store of that name");
  };
  for (const StorePath& path : paths) {
    if (path.mark && path.mark->stage != StoreStage::kNone) meet(path.mark->id, path);
    for (const StorePath::File& file : path.files) meet(file.id, path);
  }
  const auto is_creating = [](const StorePath& path) {
    return path.mark && path.mark->stage == StoreStage::kCreating;
  };
  if (std::ranges::all_of(paths, is_creating)) return {StorePresence::kAbandoned, *id};
  StoreFinding finding{StorePresence::kMade, *id};
  for (const StorePath& path : paths) {
    const bool is_lost = !path.mark || path.mark->stage == StoreStage::kNone;
    if (is_lost && path.files.empty()) throw_incomplete(name, *id, path, "does not know it");
    if (path.files.empty()) throw_incomplete(name, *id, path, "has none of its files");
    if (is_lost) finding.lost_marks.push_back(path.directory);
  }
  // A store that is half made, or half removed, has not lost its marks.
  if (finding.lost_marks.empty() || is_made ||
      (std::ranges::none_of(paths, is_creating) && has_commit(name, *id, paths)))
    return finding;
  throw Error(ErrorCode::kInput,
              fmt::format("{} has files of the store \"{}\" ({}), and no whole {}.lock, which says "
                          "whether the store was ever finished; bring that file back, name all "
                          "paths of the store in storage.paths, or remove the store with `sluice "
                          "state remove`",
                          finding.lost_marks[0], name, text_of(*id), name));
}

std::optional<std::string> store_of_record(const std::string& file) {
  if (!rank_of(file)) return std::nullopt;
  for (std::size_t end = file.find('.'); end != std::string::npos; end = file.find('.', end + 1))
    if (id_in(file, file.substr(0, end))) return file.substr(0, end);
  return std::nullopt;
}

std::set<std::uint32_t> ranks_on(std::span<const StorePath> paths) {
  std::set<std::uint32_t> ranks;
  for (const StorePath& path : paths)
    for (const StorePath::File& file : path.files)
      if (const auto rank = rank_of(file.name)) ranks.insert(*rank);
  return ranks;
}

StoreId random_store_id() {
  StoreId id{};
  SLUICE_CHECK(::getrandom(id.data(), id.size(), 0) == static_cast<ssize_t>(id.size()),
               "the kernel gives 16 random bytes");
  return id;
}

void await_users(std::span<const StorePath> paths, FileLocks& locks) {
  for (const StorePath& path : paths)
    for (const StorePath::File& file : path.files) locks.await(path.directory + "/" + file.name);
}

void remove_store_files(std::span<const StorePath> paths, const StoreId& id, std::size_t& count) {
  count = 0;
  for (const StorePath& path : paths) {
    for (const StorePath::File& file : path.files) {
      const std::string whole = path.directory + "/" + file.name;
      if (file.id != id) continue;
      if (::unlink(whole.c_str()) != 0 && errno != ENOENT) throw_unremoved(whole, errno);
      ++count;
    }
    sync_folder(path.directory);
  }
}

void remove_store_files(std::span<const StorePath> paths, const StoreId& id) {
  std::size_t ignored = 0;
  remove_store_files(paths, id, ignored);
}

std::string StoreFiles::file_name(const char* kind, std::size_t index) const {
  return fmt::format("{}.{}.r{}.{}{}", options_.name, text_of(options_.id), options_.rank, kind,
                     index);
}

StoreFiles StoreFiles::create(const Options& options, std::span<const std::uint64_t> data_bytes,
                              std::uint64_t slot_bytes) {
  SLUICE_CHECK(data_bytes.size() == options.directories.size() && !data_bytes.empty(),
               "a data file for each directory");
  StoreFiles files(options);
  const auto path_count = static_cast<std::uint32_t>(options.directories.size());
  for (std::uint32_t i = 0; i < path_count; ++i) {
    files.data_.push_back(DirectFile::create_unnamed(options.directories[i], data_bytes[i]));
    files.data_paths_.push_back(i);
  }
  for (std::uint32_t twin = 0; twin < kCommitTwins; ++twin) {
    files.record_paths_.push_back(twin % path_count);
    files.records_.push_back(DirectFile::create_unnamed(options.directories[twin % path_count],
                                                        kCommitSlots * slot_bytes));
  }
  FileLocks locks(kNoWaitSeconds);
  files.lock(locks);
  return files;
}

void StoreFiles::sync_folders() const {
  for (const std::string& directory : options_.directories) sync_folder(directory);
}

void StoreFiles::name_data() {
  for (std::size_t i = 0; i < data_.size(); ++i)
    data_[i].link_as(options_.directories[data_paths_[i]] + "/" + file_name(kData, i));
  sync_folders();
}

void StoreFiles::name_records() {
  for (std::size_t twin = 0; twin < records_.size(); ++twin)
    records_[twin].link_as(options_.directories[record_paths_[twin]] + "/" +
                           file_name(kRecords, twin));
  sync_folders();
}

void StoreFiles::find(const char* kind, std::uint32_t count, std::vector<DirectFile>& files,
                      std::vector<std::uint32_t>& paths) const {
  const std::vector<std::string>& folders = options_.directories;
  std::vector<std::string> missing;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::string name = file_name(kind, i);
    const auto found = std::ranges::find_if(folders, [&](const std::string& folder) {
      return ::access((folder + "/" + name).c_str(), F_OK) == 0;
    });
    if (found == folders.end()) {
      missing.push_back(name);
      continue;
    }
    files.push_back(DirectFile::open_existing(*found + "/" + name, options_.access));
    paths.push_back(static_cast<std::uint32_t>(found - folders.begin()));
  }
  if (!missing.empty())
    throw Error(ErrorCode::kInput,
                fmt::format("store \"{}\": {} not found in {} on {}{}; mount the missing path, "
                            "correct storage.paths, or start each rank on the host that has its "
                            "files (`sluice state list` shows what a host has)",
                            options_.name, fmt::join(missing, ", "), fmt::join(folders, ", "),
                            host_name(), options_.whereabouts));
}

StoreFiles StoreFiles::open_records(const Options& options) {
  StoreFiles files(options);
  files.find(kRecords, kCommitTwins, files.records_, files.record_paths_);
  const std::vector<DirectFile>& twins = files.records_;
  if (twins[0].size_bytes() != twins[1].size_bytes() || twins[0].size_bytes() == 0 ||
      twins[0].size_bytes() % (kCommitSlots * kCommitAlignBytes) != 0)
    throw Error(
        ErrorCode::kDamaged,
        fmt::format("{} has {} B and {} has {} B; both should have the same whole pages; {}",
                    twins[0].name(), twins[0].size_bytes(), twins[1].name(), twins[1].size_bytes(),
                    kStoreRemedy));
  return files;
}

void StoreFiles::open_data(std::uint32_t count) {
  find(kData, count, data_, data_paths_);
}

void StoreFiles::lock(FileLocks& locks) const {
  for (const DirectFile& file : records_) locks.lock(file.descriptor(), file.name());
  for (const DirectFile& file : data_) locks.lock(file.descriptor(), file.name());
}

void StoreFiles::extend_data(std::span<const std::uint64_t> data_bytes) {
  former_bytes_.clear();
  for (const DirectFile& file : data_) former_bytes_.push_back(file.size_bytes());
  try {
    for (std::size_t i = 0; i < data_.size(); ++i) data_[i].extend(data_bytes[i]);
  } catch (const Error&) {
    cut_data();
    throw;
  }
}

void StoreFiles::cut_data() noexcept {
  for (std::size_t i = 0; i < former_bytes_.size(); ++i)
    if (data_[i].size_bytes() != former_bytes_[i]) data_[i].cut(former_bytes_[i]);
}

std::vector<DirectFile> StoreFiles::shared_data() const {
  std::vector<DirectFile> shared;
  for (std::size_t i = 0; i < data_.size(); ++i)
    shared.push_back(
        data_[i].shared_as(options_.directories[data_paths_[i]] + "/" + file_name(kData, i)));
  return shared;
}

CommitFiles StoreFiles::commit_files() const {
  CommitFiles all;
  const auto as_store_file = [](const DirectFile& file, std::uint32_t drive) {
    return StoreFile{.descriptor = file.descriptor(), .drive = drive, .name = file.name()};
  };
  for (std::size_t i = 0; i < data_.size(); ++i)
    all.data.push_back(as_store_file(data_[i], data_paths_[i]));
  for (std::size_t i = 0; i < records_.size(); ++i)
    all.twins.push_back(as_store_file(records_[i], record_paths_[i]));
  all.slot_bytes = records_[0].size_bytes() / kCommitSlots;
  return all;
}

}  // namespace sluice
