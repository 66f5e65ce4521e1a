#include "tests/engine/store/simulated_rank.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "io/checksum.h"

namespace sluice::test {
namespace {

std::uint64_t mixed(std::uint64_t value) {
  value += 0x9e37'79b9'7f4a'7c15;
  value = (value ^ value >> 30) * 0xbf58'476d'1ce4'e5b9;
  value = (value ^ value >> 27) * 0x94d0'49bb'1331'11eb;
  return value ^ value >> 31;
}

}  // namespace

SimulatedRank::SimulatedRank(const SimulationOptions& options, std::uint32_t rank)
    : options_(options), rank_(rank), disk_(mixed(options.seed) + rank) {
  const std::uint64_t data_bytes = options.planes * options.copies * kPlaneBytes;
  for (std::uint32_t file = 0; file < kDataFiles; ++file)
    files_.data.push_back({.descriptor = disk_.add_file(data_bytes), .name = "data"});
  for (std::uint32_t twin = 0; twin < kCommitTwins; ++twin)
    files_.twins.push_back({.descriptor = disk_.add_file(kCommitSlots * kSlotBytes),
                            .name = fmt::format("rank {} twin {}", rank, twin)});
  files_.slot_bytes = kSlotBytes;
}

// Copies of one plane lie in both files by turns.
CommitExtent SimulatedRank::extent(std::uint32_t plane, std::uint8_t copy) const {
  return {.file = (plane + copy) % kDataFiles,
          .offset_bytes = (plane * options_.copies + copy) * kPlaneBytes};
}

void SimulatedRank::fill(std::span<std::byte> target, std::uint32_t plane,
                         std::uint64_t version) const {
  std::uint64_t word = mixed(mixed(mixed(rank_ + 1) + plane) + version);
  for (std::size_t at = 0; at < target.size(); at += sizeof(word)) {
    word = mixed(word);
    std::memcpy(target.data() + at, &word, sizeof(word));
  }
}

void SimulatedRank::begin_life() {
  messages_.clear();
  stores_.clear();
  for (std::uint32_t plane = 0; plane < options_.planes; ++plane) {
    stores_.push_back(std::make_unique<Store>());
    stores_.back()->rank = this;
    stores_.back()->plane = plane;
  }
  copies_ = PlaneCopies(options_.planes, options_.copies);
  writer_ = std::make_unique<CommitWriter>(
      disk_, files_, [this](std::function<void()> message) { messages_.push_back(message); });
  disk_.let_requests_wait();
}

void SimulatedRank::create() {
  begin_life();
  versions_.assign(options_.planes, 0);
  for (std::uint32_t plane = 0; plane < options_.planes; ++plane) {
    const CommitExtent place = extent(plane, 0);
    Store& store = *stores_[plane];
    fill(store.data, plane, 0);
    store.request = {.kind = IoKind::kWrite,
                     .descriptor = files_.data[place.file].descriptor,
                     .offset_bytes = place.offset_bytes,
                     .data = store.data.data(),
                     .length_bytes = kPlaneBytes,
                     .on_complete = [](IoRequest&) {}};
    IoRequest* const pointer = &store.request;
    disk_.submit({&pointer, 1});
  }
  while (disk_.run_one()) {
  }
  // Whatever is wrong later, the first commit is not.
  copies_.begin_commit();
  const std::uint64_t bytes = encode_commit(record(), writer_->buffer());
  writer_->begin(commit_sequence(kDataFiles), 0, bytes, 0, [](const auto&) {});
  while (!writer_->is_idle()) {
    disk_.run_one();
    while (!messages_.empty()) {
      messages_.front()();
      messages_.pop_front();
    }
  }
  copies_.end_commit();
  next_slot_ = 1;
  next_generation_ = 2;
}

CommitRecord SimulatedRank::record() const {
  CommitRecord record{.rank = rank_,
                      .rank_count = options_.ranks,
                      .generation = next_generation_,
                      .step = step_,
                      .file_count = kDataFiles};
  for (std::uint32_t plane = 0; plane < options_.planes; ++plane) {
    std::array<std::byte, kPlaneBytes> data;
    fill(data, plane, versions_[plane]);
    CommitPlane entry{.length_bytes = kPlaneBytes,
                      .version = versions_[plane],
                      .checksum = checksum(data),
                      .copy_count = options_.copies,
                      .named_copy = copies_.named_by_next(plane)};
    for (std::uint8_t copy = 0; copy < options_.copies; ++copy)
      entry.copies[copy] = extent(plane, copy);
    record.planes.push_back(entry);
  }
  return record;
}

CommitSequence SimulatedRank::sequence() const {
  CommitSequence all = commit_sequence(kDataFiles);
  switch (options_.mutation) {
    case Mutation::kDataNotFlushed: all.erase(all.begin()); break;
    case Mutation::kRecordBeforeData: std::ranges::rotate(all, all.begin() + 1); break;
    case Mutation::kTwinsAtOnce:
      all = {all[0], {all[1][0], all[3][0]}, {all[2][0], all[4][0]}};
      break;
    case Mutation::kTwinsNotFlushed: all = {all[0], all[1], all[3]}; break;
    default: break;
  }
  return all;
}

// A plane's next version has to be stored: with every step, or for a commit.
bool SimulatedRank::wants_store(std::uint32_t plane) const {
  const std::uint64_t next = step_ + 1;
  return versions_[plane] < next && (!is_in_memory(plane) || is_due(next)) &&
         !stores_[plane]->is_under_way;
}

bool SimulatedRank::may_store(std::uint32_t plane) const {
  if (!wants_store(plane)) return false;
  if (!options_.is_eager && voted_ <= step_) return false;
  if (is_due(step_) && begun_ < step_) return false;  // its commit takes the table first
  return mutates(Mutation::kStoreInPlace) ||
         copies_.target(plane, PlaneCopies::InPlace::kYes).has_value();
}

void SimulatedRank::start_store(std::uint32_t plane) {
  Store& store = *stores_[plane];
  store.copy = mutates(Mutation::kStoreInPlace)
                   ? copies_.home(plane)
                   : *copies_.target(plane, PlaneCopies::InPlace::kYes);
  const CommitExtent place = extent(plane, store.copy);
  fill(store.data, plane, step_ + 1);
  store.is_under_way = true;
  store.request = {.kind = IoKind::kWrite,
                   .descriptor = files_.data[place.file].descriptor,
                   .offset_bytes = place.offset_bytes,
                   .data = store.data.data(),
                   .length_bytes = kPlaneBytes};
  store.request.context = &store;
  store.request.on_complete = [](IoRequest& request) {
    auto* done = static_cast<Store*>(request.context);
    done->rank->messages_.push_back([done] { done->rank->stored(*done); });
  };
  IoRequest* const pointer = &store.request;
  disk_.submit({&pointer, 1});
}

void SimulatedRank::stored(Store& store) {
  store.is_under_way = false;
  if (!mutates(Mutation::kStoreInPlace)) copies_.stored(store.plane, store.copy);
  versions_[store.plane] = step_ + 1;
  finish_step_if_whole();
}

void SimulatedRank::finish_step_if_whole() {
  const std::uint64_t next = step_ + 1;
  if (voted_ < next) return;
  for (std::uint32_t plane = 0; plane < options_.planes; ++plane) {
    const bool may_lag = is_in_memory(plane) && !is_due(next);
    if (versions_[plane] < next && !may_lag) return;
  }
  step_ = next;
}

bool SimulatedRank::may_commit() const {
  if (!writer_->is_idle() || copies_.is_committing()) return false;
  if (is_due(step_) && begun_ < step_) return true;
  if (!mutates(Mutation::kCommitTooEarly) || voted_ <= step_ || !is_due(step_ + 1)) return false;
  return begun_ == step_ && std::ranges::all_of(stores_, [&](const auto& store) {
           return store->is_under_way || versions_[store->plane] > step_;
         });
}

void SimulatedRank::begin_commit() {
  committing_ = begun_ < step_ ? step_ : step_ + 1;  // the latter: too early
  begun_ = committing_;
  copies_.begin_commit();
  CommitRecord next = record();
  next.step = committing_;
  const std::uint64_t bytes = encode_commit(next, writer_->buffer());
  if (mutates(Mutation::kFreedTooEarly)) copies_.end_commit();
  const std::uint32_t slot = mutates(Mutation::kNewestOverwritten) ? 1 - next_slot_ : next_slot_;
  if (!mutates(Mutation::kGenerationStays)) ++next_generation_;
  next_slot_ = 1 - next_slot_;
  writer_->begin(sequence(), slot, bytes, committing_,
                 [this](const std::optional<Error>& failure) { commit_ended(failure); });
}

void SimulatedRank::commit_ended(const std::optional<Error>& failure) {
  if (failure) throw *failure;
  durable_ = committing_;
  if (mutates(Mutation::kOwnCommitSuffices) && copies_.is_committing()) copies_.end_commit();
}

bool SimulatedRank::may_vote() const {
  return voted_ == step_ && writer_->is_idle() && (!is_due(step_) || durable_ >= step_);
}

void SimulatedRank::begin_step() {
  ++voted_;
  if (copies_.is_committing()) copies_.end_commit();
  finish_step_if_whole();  // eager stores may have ended all
}

void SimulatedRank::advance(std::uint64_t random) {
  if (random % 2 == 0 && !messages_.empty()) {
    const auto message = std::move(messages_.front());
    messages_.pop_front();
    return message();
  }
  if (random % 3 == 0 && disk_.run_one()) return;
  if (may_commit()) return begin_commit();
  const auto first = static_cast<std::uint32_t>((random >> 8) % options_.planes);
  for (std::uint32_t i = 0; i < options_.planes; ++i) {
    const std::uint32_t plane = (first + i) % options_.planes;
    if (may_store(plane)) return start_store(plane);
  }
  disk_.run_one();
}

void SimulatedRank::end(bool is_power_cut) {
  if (is_power_cut) {
    disk_.cut();
  } else {
    disk_.kill();
  }
  messages_.clear();
  writer_.reset();
  opening_.reset();
}

CommitOffer SimulatedRank::open(std::uint64_t requests) {
  disk_.complete_at_once(requests);
  opening_.emplace(disk_, files_);
  return opening_->offer();
}

void SimulatedRank::settle(std::uint64_t step, std::uint64_t requests) {
  disk_.complete_at_once(requests);
  went_back_ = opening_->newest()->step != step;
  disk_.lose_writes(mutates(Mutation::kVoidLeftOut));
  opening_->go_back(step);
  disk_.lose_writes(mutates(Mutation::kMendLeftOut));
  (void)opening_->mend();
  disk_.lose_writes(false);
  begin_life();
  next_generation_ = opening_->choice().next_generation;
  next_slot_ = opening_->choice().next_slot;
  step_ = voted_ = begun_ = durable_ = step;
}

std::string SimulatedRank::find_loss() {
  const CommitRecord* found = opening_->newest();
  if (found == nullptr || found->step != step_)
    return fmt::format("rank {} has no commit of step {}", rank_, step_);
  versions_.assign(options_.planes, step_);
  for (std::uint32_t plane = 0; plane < options_.planes; ++plane) {
    const CommitPlane& entry = found->planes[plane];
    const CommitExtent& place = entry.copies[entry.named_copy];
    const int file = files_.data[place.file].descriptor;
    const auto data = disk_.bytes(file).subspan(place.offset_bytes, kPlaneBytes);
    std::array<std::byte, kPlaneBytes> expected;
    fill(expected, plane, step_);
    if (!std::ranges::equal(data, expected) || entry.checksum != checksum(data) ||
        entry.version != step_)
      return fmt::format("rank {}, step {}: plane {} is lost", rank_, step_, plane);
    copies_.restore(plane, static_cast<std::uint8_t>(entry.named_copy));
  }
  return {};
}

void SimulatedRank::flip_record_bit(std::uint64_t random) {
  const std::size_t twin = random % kCommitTwins;
  const CommitRecord* found = opening_->newest();
  const std::uint64_t slot = *opening_->choice().newest;
  const std::uint64_t bit = (random >> 8) % (8 * commit_bytes(*found));
  disk_.flip(files_.twins[twin].descriptor, slot * kSlotBytes + bit / 8,
             static_cast<std::uint8_t>(1u << bit % 8));
}

}  // namespace sluice::test
