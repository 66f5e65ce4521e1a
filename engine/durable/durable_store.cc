#include "engine/durable/durable_store.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/durable/copy_places.h"
#include "engine/durable/host_findings.h"
#include "engine/plan/striping.h"
#include "engine/store/commit_opening.h"
#include "engine/store/missing_promise.h"

namespace sluice {
namespace {

constexpr std::string_view kSubject = "the durable store";
// Tries while another rank of the job has taken a lock, and has not yet written its text.
constexpr int kLockTries = 16;
constexpr std::chrono::milliseconds kLockPause{50};

// The steps that a rank can continue from, in the form for the exchange.
struct OfferWords {
  std::uint64_t has_newest = 0;
  std::uint64_t newest = 0;
  std::uint64_t has_older = 0;
  std::uint64_t older = 0;

  CommitOffer offer() const {
    return {.newest = has_newest != 0 ? std::optional(newest) : std::nullopt,
            .older = has_older != 0 ? std::optional(older) : std::nullopt};
  }
};

// The finding of a rank on its paths, in the form for the exchange.
struct FindingWords {
  std::uint64_t presence = 0;
  StoreId id{};
  std::array<char, 256> host{};  // ends with a zero
};

std::string text_of(const CommitOffer& offer) {
  if (!offer.newest) return "none";
  return offer.older ? fmt::format("{} or {}", *offer.newest, *offer.older)
                     : fmt::format("{}", *offer.newest);
}

}  // namespace

DurableStore::DurableStore(const Config& config, const ModelSpec& model, const Layout& layout,
                           Placement& placement, Ranks& ranks)
    : config_(config),
      layout_(layout),
      ranks_(ranks),
      name_(config.storage.state.name),
      identity_(config, model, layout, ranks.count()),
      file_locks_(config.storage.timeout_s) {
  lock();
  const StoreFinding found = find();
  for (const std::string& path : config.storage.paths)
    if (const std::string missing = missing_promise(path); !missing.empty())
      notes_.push_back(fmt::format("storage: {} is {}", path, missing));
  start_.commit_every = config.storage.state.commit_every;
  start_.has_others = ranks.are_several();
  if (found.presence == StorePresence::kMade) {
    id_ = found.id;
    open(placement);
  } else {
    make(placement);
  }
  if (std::string note = file_locks_.note(); !note.empty()) notes_.push_back(std::move(note));
}

// Takes the lock on every path, before anything else there is touched.
void DurableStore::lock() {
  const std::string job =
      ranks_.share(ranks_.rank() == 0 ? sluice::text_of(random_store_id()) : "", kSubject);
  ranks_.together(kSubject, [&] {
    for (const std::string& path : config_.storage.paths) {
      for (int left = ranks_.are_several() ? kLockTries : 1;;
           std::this_thread::sleep_for(kLockPause)) {
        try {
          locks_.emplace_back(path, name_, job);
          break;
        } catch (const Error&) {
          if (--left == 0) throw;
        }
      }
    }
  });
}

StoreFinding DurableStore::find() {
  StoreFinding own;
  ranks_.together(kSubject, [&] {
    for (const std::string& path : config_.storage.paths)
      paths_.push_back(look_at_path(path, name_));
    own = find_store(name_, paths_);
  });
  const StoreFinding found = share_finding(own);
  if (found.presence != StorePresence::kAbandoned) return found;
  const bool has_files = own.presence == StorePresence::kAbandoned;
  // One rank waits and removes on a path. Two would meet each other's locks.
  ranks_.together_for_long(kSubject, [&] {
    for (std::size_t path = 0; has_files && path < locks_.size(); ++path)
      if (locks_[path].is_own()) await_users(std::span(paths_).subspan(path, 1), file_locks_);
  });
  ranks_.together(kSubject, [&] {
    for (std::size_t path = 0; has_files && path < locks_.size(); ++path)
      if (locks_[path].is_own()) remove_store_files(std::span(paths_).subspan(path, 1), own.id);
  });
  if (has_files)
    notes_.push_back(
        fmt::format("storage: the store \"{}\" ({}) was never finished, and has been removed",
                    name_, sluice::text_of(own.id)));
  return found;
}

// Returns what all ranks together have found.
StoreFinding DurableStore::share_finding(const StoreFinding& own) {
  FindingWords words{
      .presence = static_cast<std::uint64_t>(own.presence), .id = own.id, .host = {}};
  (void)host_name().copy(words.host.data(), words.host.size() - 1);
  const std::vector<std::byte> all = ranks_.exchange(std::as_bytes(std::span(&words, 1)), kSubject);
  std::vector<HostFinding> findings;
  for (std::uint32_t rank = 0; rank < ranks_.count(); ++rank) {
    std::memcpy(&words, all.data() + rank * sizeof words, sizeof words);
    findings.push_back({words.host.data(), {static_cast<StorePresence>(words.presence), words.id}});
  }
  return finding_of_all(name_, findings);
}

StoreFiles::Options DurableStore::options() const {
  return {.directories = config_.storage.paths,
          .name = name_,
          .id = id_,
          .rank = ranks_.rank(),
          .whereabouts = whereabouts_};
}

// "; HOST has the files of ranks 0, 1; ..."
std::string DurableStore::find_whereabouts() const {
  if (!ranks_.are_several()) return {};
  const std::set<std::uint32_t> found = ranks_on(paths_);
  const std::string own = fmt::format("; {} has the files of {}{}", host_name(),
                                      found.empty()       ? "no rank"
                                      : found.size() == 1 ? "rank "
                                                          : "ranks ",
                                      fmt::join(found, ", "));
  std::set<std::string> all;
  for (const auto& bytes : ranks_.gather(std::as_bytes(std::span(own)), kSubject))
    all.emplace(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return fmt::format("{}", fmt::join(all, ""));
}

void DurableStore::make(const Placement& placement) {
  const StoreId own = random_store_id();
  std::string id(reinterpret_cast<const char*>(own.data()), own.size());
  id = ranks_.share(id, kSubject);
  std::memcpy(id_.data(), id.data(), id_.size());
  ranks_.together(kSubject, [&] {
    CopyPlaces places = place_copies(layout_, placement, storage_weights(config_.storage));
    const auto count = static_cast<std::uint64_t>(std::ranges::count_if(
        places.planes, [](const CommitPlane& plane) { return plane.length_bytes != 0; }));
    files_ = StoreFiles::create(options(), places.file_bytes, commit_slot_bytes(count));
    homes_.planes = std::move(places.planes);
  });
  commit_files_ = files_->commit_files();
  homes_.drives.assign(files_->data_paths().begin(), files_->data_paths().end());
  homes_.files = files_->shared_data();
  start_.record = {.store_id = id_,
                   .rank = ranks_.rank(),
                   .rank_count = ranks_.count(),
                   .model_hash = identity_.model_hash(),
                   .layout_hash = identity_.layout_hash(),
                   .config_hash = identity_.config_hash(),
                   .file_count = static_cast<std::uint32_t>(files_->data().size()),
                   .settings = identity_.settings()};
  start_.files = &commit_files_;
}

void DurableStore::open(Placement& placement) {
  std::optional<CommitOpening> opening;
  const std::unique_ptr<IoQueue> queue = make_sync_queue({});
  CommitFiles records;
  whereabouts_ = find_whereabouts();
  // The last transfers of a rank that was killed may still be under way. They come first,
  // because they may change the records, and may go to copies that this run writes.
  ranks_.together_for_long(kSubject, [&] {
    files_ = StoreFiles::open_records(options());
    files_->lock(file_locks_);
    records = files_->commit_files();
    opening.emplace(*queue, records);
    if (opening->newest() == nullptr)
      throw Error(ErrorCode::kDamaged, fmt::format("the store \"{}\" has no commit in {}; {}",
                                                   name_, records.twins[0].name, kStoreRemedy));
    check(*opening->newest(), records.twins[0].name);
    files_->open_data(opening->newest()->file_count);
    files_->lock(file_locks_);
    take_planes(*opening->newest(), placement);
  });
  const std::uint64_t step = agree_on_step(opening->offer());
  try {
    ranks_.together(kSubject, [&] { add_missing_copies(placement); });
  } catch (const Error&) {
    files_->cut_data();  // another rank has no room
    throw;
  }
  ranks_.together(kSubject, [&] {
    if (opening->newest()->step != step)
      notes_.push_back(
          fmt::format("storage: rank {} goes back from step {} to step {}, the last "
                      "that every rank has",
                      ranks_.rank(), opening->newest()->step, step));
    opening->go_back(step);
    std::ranges::move(opening->mend(), std::back_inserter(notes_));
    mend_marks();
  });
  offer_ = opening->offer();
  start_.record = *opening->newest();
  start_.next_slot = opening->choice().next_slot;
  start_.next_generation = opening->choice().next_generation;
  commit_files_ = files_->commit_files();
  start_.files = &commit_files_;
  homes_.drives.assign(files_->data_paths().begin(), files_->data_paths().end());
  homes_.files = files_->shared_data();
}

void DurableStore::require_other_step(std::uint64_t step) const {
  if (!ranks_.are_several() || (offer_.newest != step && offer_.older != step)) return;
  throw Error(ErrorCode::kInput,
              fmt::format("the store \"{}\" of {} ranks has a commit of step {} already (rank {} "
                          "has {}), which a state of the same step cannot replace safely; remove "
                          "it first with `sluice state remove`, or choose another "
                          "storage.state.name",
                          name_, ranks_.count(), step, ranks_.rank(), text_of(offer_)));
}

// Comes before any change.
void DurableStore::check(const CommitRecord& record, const std::string& file) const {
  std::string obstacle = identity_.obstacle(record.model_hash, record.layout_hash, record.settings);
  if (obstacle.empty() && (record.rank != ranks_.rank() || record.rank_count != ranks_.count()))
    obstacle = fmt::format("its files are of rank {} of {}, and this is rank {} of {}", record.rank,
                           record.rank_count, ranks_.rank(), ranks_.count());
  if (!obstacle.empty())
    throw Error(ErrorCode::kInput,
                fmt::format("the store \"{}\" ({}) cannot be continued, because {}; use the "
                            "setup that made it, as `sluice state inspect` shows it, or choose "
                            "another storage.state.name{}",
                            name_, file, obstacle,
                            identity_.can_take_over(record.settings)
                                ? ", whose store may begin with this state: restore a checkpoint "
                                  "of `sluice state export`, converted if the precision differs "
                                  "(`sluice train --resume-from store:NAME --convert`)"
                                : ""));
}

// Places the copies as in the record.
void DurableStore::take_planes(const CommitRecord& record, Placement& placement) {
  const auto fail = [&](const std::string& why) {
    throw Error(ErrorCode::kDamaged,
                fmt::format("the store \"{}\": {}; {}", name_, why, kStoreRemedy));
  };
  auto from = record.planes.begin();
  std::uint32_t copies = 0;
  for (std::uint32_t plane = 0; plane < 2 * layout_.blocks().size(); ++plane) {
    const std::uint64_t bytes = copy_bytes(layout_, plane);
    homes_.planes.emplace_back();
    if (bytes == 0) continue;
    if (from == record.planes.end() || from->length_bytes != bytes)
      fail(fmt::format("its record's plane {} does not fit the model's block {}",
                       from - record.planes.begin(), plane / 2));
    for (std::uint32_t copy = 0; copy < from->copy_count; ++copy) {
      const CommitExtent& extent = from->copies[copy];
      const DirectFile& file = files_->data()[extent.file];
      if (extent.offset_bytes + bytes > file.size_bytes())
        fail(fmt::format("{} has {} B, but should reach to {}; it has been truncated", file.name(),
                         file.size_bytes(), extent.offset_bytes + bytes));
    }
    homes_.planes.back() = *from;
    if (!layout_.is_frozen(BlockId{plane / 2})) copies = from->copy_count;
    ++from;
  }
  if (copies > placement.durable_copies) add_copies(layout_, copies, placement);
}

// A policy may want a third copy, which the store was made without. It comes after what the record
// names, so that a run that ends before its first commit leaves the store as it was.
void DurableStore::add_missing_copies(const Placement& placement) {
  std::vector<std::uint64_t> file_bytes(files_->data().size(), 0);
  for (const CommitPlane& plane : homes_.planes) {
    for (const CommitExtent& copy : std::span(plane.copies).first(plane.copy_count)) {
      std::uint64_t& end = file_bytes[copy.file];
      end = std::max(end, copy.offset_bytes + plane.length_bytes);
    }
  }
  const std::vector<std::uint64_t> named_bytes = file_bytes;
  for (std::uint32_t plane = 0; plane < homes_.planes.size(); ++plane) {
    CommitPlane& of = homes_.planes[plane];
    if (of.length_bytes == 0 || layout_.is_frozen(BlockId{plane / 2})) continue;
    while (of.copy_count < placement.durable_copies) {
      std::uint64_t& end = file_bytes[of.copies[0].file];
      of.copies[of.copy_count++] = {.file = of.copies[0].file, .offset_bytes = end};
      end += of.length_bytes;
    }
  }
  if (file_bytes == named_bytes) return;
  extra_copies_.emplace(*files_, file_bytes);
  notes_.push_back(fmt::format("storage: the store \"{}\" gets {} copies of the state", name_,
                               placement.durable_copies));
}

std::uint64_t DurableStore::agree_on_step(const CommitOffer& own) {
  const OfferWords words{.has_newest = own.newest.has_value(),
                         .newest = own.newest.value_or(0),
                         .has_older = own.older.has_value(),
                         .older = own.older.value_or(0)};
  const std::vector<std::byte> all = ranks_.exchange(std::as_bytes(std::span(&words, 1)), kSubject);
  std::vector<CommitOffer> offers;
  for (std::uint32_t rank = 0; rank < ranks_.count(); ++rank) {
    OfferWords of_rank;
    std::memcpy(&of_rank, all.data() + rank * sizeof of_rank, sizeof of_rank);
    offers.push_back(of_rank.offer());
  }
  if (const auto step = common_step(offers)) return *step;
  std::string steps;
  for (std::uint32_t rank = 0; rank < ranks_.count(); ++rank)
    steps += fmt::format("{}rank {}: {}", rank == 0 ? "" : "; ", rank, text_of(offers[rank]));
  throw Error(ErrorCode::kDamaged,
              fmt::format("the ranks of the store \"{}\" have no step in common ({}); {}", name_,
                          steps, kStoreRemedy));
}

void DurableStore::set_marks(StoreStage stage) {
  ranks_.together(kSubject, [&] {
    for (StoreLock& lock : locks_)
      if (lock.is_own()) lock.set_mark({.stage = stage, .id = id_});
  });
}

// A kill may come between the marks of two paths. Without this, the path that still says "creating"
// would look abandoned one day, when it is the only one that is given.
void DurableStore::mend_marks() {
  for (std::size_t path = 0; path < locks_.size(); ++path) {
    StoreLock& lock = locks_[path];
    if (!lock.is_own() || lock.mark().stage == StoreStage::kMade) continue;
    const bool was_lost = lock.mark().stage == StoreStage::kNone;
    lock.set_mark({.stage = StoreStage::kMade, .id = id_});
    if (was_lost)
      notes_.push_back(
          fmt::format("storage: {}/{}.lock was missing or damaged, and has been "
                      "written again: all files of the store are there",
                      paths_[path].directory, name_));
  }
}

void DurableStore::name_data() {
  set_marks(StoreStage::kCreating);
  ranks_.together(kSubject, [&] { files_->name_data(); });
}

// Rank 0 comes last.
void DurableStore::name_records() {
  for (const bool is_first : {false, true})
    ranks_.together(kSubject, [&] {
      if ((ranks_.rank() == 0) == is_first) files_->name_records();
    });
  set_marks(StoreStage::kMade);
}

}  // namespace sluice
