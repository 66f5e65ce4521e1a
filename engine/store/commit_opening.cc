#include "engine/store/commit_opening.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include <fmt/format.h>

namespace sluice {
namespace {

// Brings completions to the thread that waits for them.
class Mailbox {
 public:
  void post(std::function<void()> message) {
    const std::scoped_lock lock(mutex_);
    messages_.push_back(std::move(message));
    came_.notify_one();  // under the lock: the waiter may be gone next
  }
  template <class Done>
  void run_until(const Done& done) {
    while (!done()) {
      std::unique_lock lock(mutex_);
      came_.wait(lock, [this] { return !messages_.empty(); });
      const auto message = std::move(messages_.front());
      messages_.pop_front();
      lock.unlock();
      message();
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::function<void()>> messages_;  // guarded by mutex_
};

// A slot that cannot be read counts as damaged: its twin may be whole.
CommitReading reading_of(const IoRequest& request) {
  if (request.error == 0) return decode_commit({request.data, request.length_bytes});
  return {.state = CommitState::kDamaged,
          .problem = fmt::format("it cannot be read: {}", errno_text(request.error))};
}

}  // namespace

void write_commit(IoQueue& queue, const CommitFiles& files, CommitSequence sequence,
                  std::uint32_t slot, const CommitRecord& record) {
  Mailbox mailbox;
  CommitWriter writer(queue, files,
                      [&](std::function<void()> message) { mailbox.post(std::move(message)); });
  bool is_done = false;
  std::optional<Error> failure;
  writer.begin(std::move(sequence), slot, encode_commit(record, writer.buffer()), record.step,
               [&](std::optional<Error> error) {
                 failure = std::move(error);
                 is_done = true;
               });
  mailbox.run_until([&] { return is_done; });
  if (failure) throw *failure;
}

CommitOpening::CommitOpening(IoQueue& queue, const CommitFiles& files)
    : queue_(queue), files_(files) {
  const std::uint64_t all_bytes = kCommitSlots * kCommitTwins * files.slot_bytes;
  const AlignedBuffer buffer(all_bytes, "commit records");
  Mailbox mailbox;
  std::size_t pending = 0;
  struct Reading {
    IoRequest request;
    Mailbox* mailbox = nullptr;
    std::size_t* pending = nullptr;
  };
  std::array<Reading, kCommitSlots * kCommitTwins> readings;
  for (std::uint32_t i = 0; i < readings.size(); ++i) {
    const StoreFile& file = files.twins[i % kCommitTwins];
    Reading& reading = readings[i];
    reading.mailbox = &mailbox;
    reading.pending = &pending;
    reading.request = {.drive = file.drive,
                       .descriptor = file.descriptor,
                       .offset_bytes = i / kCommitTwins * files.slot_bytes,
                       .data = buffer.data() + i * files.slot_bytes,
                       .length_bytes = files.slot_bytes};
    reading.request.context = &reading;
    reading.request.on_complete = [](IoRequest& request) {
      auto* done = static_cast<Reading*>(request.context);
      done->mailbox->post([done] { --*done->pending; });
    };
    ++pending;
    IoRequest* const pointer = &reading.request;
    queue.submit({&pointer, 1});
  }
  mailbox.run_until([&] { return pending == 0; });
  for (std::uint32_t twin = 0; twin < kCommitTwins; ++twin)
    found_.names[twin] = files.twins[twin].name;
  for (std::uint32_t i = 0; i < readings.size(); ++i)
    found_.readings[i / kCommitTwins][i % kCommitTwins] = reading_of(readings[i].request);
  choice_ = choose_commit(found_);
}

const CommitRecord* CommitOpening::newest() const {
  return choice_.newest ? &record_of_slot(found_, *choice_.newest)->record : nullptr;
}

CommitOffer CommitOpening::offer() const {
  const auto step_of = [this](const std::optional<std::uint32_t>& slot) {
    return slot ? std::optional(record_of_slot(found_, *slot)->record.step) : std::nullopt;
  };
  return {.newest = step_of(choice_.newest), .older = step_of(choice_.older)};
}

const CommitRecord& CommitOpening::of_step(std::uint64_t step) const {
  const CommitRecord* const now = newest();
  if (now != nullptr && now->step == step) return *now;
  SLUICE_CHECK(offer().older == step, "one of a rank's commits is of the step");
  return record_of_slot(found_, *choice_.older)->record;
}

void CommitOpening::go_back(std::uint64_t step) {
  const CommitRecord* now = newest();
  if (now != nullptr && now->step == step) return;
  SLUICE_CHECK(offer().older == step, "a rank goes back to a step that it has");
  const std::uint32_t slot = *choice_.newest;
  CommitRecord nothing{.kind = CommitKind::kVoid,
                       .store_id = now->store_id,
                       .rank = now->rank,
                       .rank_count = now->rank_count,
                       .generation = choice_.next_generation,
                       .step = now->step};
  const auto torn = std::ranges::find(choice_.mends, slot, &SlotTwin::slot);
  write_commit(queue_, files_, void_sequence(torn == choice_.mends.end() ? 0 : torn->twin), slot,
               nothing);
  std::erase_if(choice_.mends, [slot](const SlotTwin& mend) { return mend.slot == slot; });
  choice_.newest = std::exchange(choice_.older, std::nullopt);
  choice_.next_slot = slot;
  ++choice_.next_generation;
}

std::vector<std::string> CommitOpening::mend() {
  std::vector<std::string> notes;
  for (const SlotTwin& mend : choice_.mends) {
    write_commit(queue_, files_, mend_sequence(mend.twin), mend.slot,
                 record_of_slot(found_, mend.slot)->record);
    const CommitReading& before = found_.readings[mend.slot][mend.twin];
    if (before.state == CommitState::kDamaged)
      notes.push_back(
          fmt::format("storage: commit record {} in {} was damaged ({}) and has been "
                      "written again from its twin",
                      mend.slot, found_.names[mend.twin], before.problem));
  }
  choice_.mends.clear();
  return notes;
}

}  // namespace sluice
