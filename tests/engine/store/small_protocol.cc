#include "tests/engine/store/small_protocol.h"

#include <algorithm>
#include <array>
#include <optional>
#include <unordered_set>
#include <vector>

#include <fmt/format.h>

#include "engine/store/commit_choice.h"
#include "engine/store/plane_copies.h"

namespace sluice::test {
namespace {

constexpr std::uint32_t kBlocksMax = 2;
constexpr std::uint32_t kRanksMax = 2;
constexpr std::uint8_t kNoStep = 0xff;
// The versions of a state that another one has been restored over.
constexpr std::uint8_t kReplaced = 0x40;

enum class Way : std::uint8_t { kIdle, kInLane, kStoring, kTentative };
enum class Commit : std::uint8_t { kNone, kFlushing, kWriting };

// A copy on storage: what it holds once all is flushed, and whether it has been.
struct Copy {
  std::uint8_t version = kNoStep;
  bool is_flushed = false;
};

struct Block {
  std::uint8_t version = 0;
  Way way = Way::kIdle;
  std::uint8_t target = 0;  // of the store, or of the tentative one
  bool is_early = false;    // the update was begun before the vote
  std::array<Copy, 3> copies;
};

struct Record {
  std::uint8_t step = kNoStep;
  std::uint8_t version = kNoStep;  // of the copies: the step, or a replaced state
  std::array<std::uint8_t, kBlocksMax> copies{};
};

struct Rank {
  PlaneCopies copies{kBlocksMax, 2};
  std::array<Block, kBlocksMax> blocks;
  std::array<Record, kCommitSlots> slots;
  Record next;  // being written
  Commit commit = Commit::kNone;
  std::uint8_t newest = 0;  // slot
  std::uint8_t step = 0;    // that is whole
  std::int8_t begun = 0;    // whose commit has begun; -1: none since the restored state
  std::int8_t durable = 0;  // whose commit has ended
};

struct State {
  std::array<Rank, kRanksMax> ranks;
  std::uint8_t voted = 0;  // the step whose norm is known
};

class Explorer {
 public:
  explicit Explorer(const SmallProtocol& protocol) : protocol_(protocol) {}

  SmallOutcome run() {
    visit(first());
    while (!waiting_.empty() && outcome_.unopenable.empty() && outcome_.deadlock.empty()) {
      const State state = std::move(waiting_.back());
      waiting_.pop_back();
      const std::size_t before = ways_;
      expand(state);
      if (ways_ == before && !is_end(state)) outcome_.deadlock = text_of(state);
    }
    outcome_.states = seen_.size();
    return outcome_;
  }

 private:
  State first() const {
    State state;
    for (Rank& rank : state.ranks) {
      rank.copies = PlaneCopies(protocol_.blocks, protocol_.copies);
      const auto over = static_cast<std::uint8_t>(protocol_.restored_over);
      const auto version = static_cast<std::uint8_t>(over == 0 ? 0 : kReplaced | over);
      for (Block& block : rank.blocks) block.copies[0] = {version, true};
      rank.slots[0] = {.step = over, .version = version};
      for (std::uint32_t block = 0; block < protocol_.blocks; ++block)
        rank.copies.restore(block, 0);
      if (over == 0) continue;
      rank.begun = rank.durable = -1;
      for (std::uint32_t id = 0; id < protocol_.blocks; ++id) {
        const std::uint8_t target = *rank.copies.target(id, PlaneCopies::InPlace::kYes);
        rank.blocks[id].copies[target] = {0, false};
        rank.copies.stored(id, target);
      }
    }
    return state;
  }

  bool is_due(std::uint32_t step) const { return step % protocol_.commit_every == 0; }
  bool is_end(const State& state) const {
    return std::all_of(state.ranks.begin(), state.ranks.begin() + protocol_.ranks,
                       [&](const Rank& rank) { return rank.step == protocol_.steps; });
  }

  void visit(State state) {
    ++ways_;
    for (std::uint32_t rank = 0; rank < protocol_.ranks; ++rank) finish_step(state, rank);
    if (!seen_.insert(key_of(state)).second) return;
    outcome_.ended |= is_end(state);
    check_openable(state);
    waiting_.push_back(std::move(state));
  }

  void finish_step(State& state, std::uint32_t index) const {
    Rank& rank = state.ranks[index];
    if (state.voted <= rank.step) return;
    for (std::uint32_t block = 0; block < protocol_.blocks; ++block)
      if (rank.blocks[block].version <= rank.step) return;
    ++rank.step;
  }

  void expand(const State& state) {
    for (std::uint32_t rank = 0; rank < protocol_.ranks; ++rank) {
      for (std::uint32_t block = 0; block < protocol_.blocks; ++block)
        move_block(state, rank, block);
      move_commit(state, rank);
    }
    vote(state);
  }

  // Whether an update may take a lane: not beyond the last step, not two in one step.
  bool may_begin(const State& state, const Rank& rank, const Block& block) const {
    if (block.way != Way::kIdle || block.version != rank.step || rank.step == protocol_.steps)
      return false;
    if (protocol_.policy == SmallPolicy::kDeferred && state.voted <= rank.step) return false;
    std::uint32_t busy = 0;
    for (const Block& other : rank.blocks)
      busy += other.way == Way::kInLane || other.way == Way::kStoring;
    return busy < protocol_.lanes;
  }

  void move_block(const State& state, std::uint32_t at, std::uint32_t id) {
    const Rank& rank = state.ranks[at];
    const Block& block = rank.blocks[id];
    if (may_begin(state, rank, block)) {
      State next = state;
      next.ranks[at].blocks[id].way = Way::kInLane;
      next.ranks[at].blocks[id].is_early =
          protocol_.policy == SmallPolicy::kSpeculative && state.voted <= rank.step;
      visit(std::move(next));
    } else if (block.way == Way::kInLane) {
      begin_store(state, at, id);
    } else if (block.way == Way::kStoring) {
      State next = state;
      Block& stored = next.ranks[at].blocks[id];
      stored.copies[stored.target].version = static_cast<std::uint8_t>(block.version + 1);
      const bool was_wrong = stored.is_early && state.voted > rank.step;
      stored.way = stored.is_early && !was_wrong ? Way::kTentative : Way::kIdle;
      if (!stored.is_early) make_home(next.ranks[at], id);
      if (was_wrong) stored.is_early = false;
      visit(std::move(next));
    }
  }

  static void make_home(Rank& rank, std::uint32_t id) {
    Block& block = rank.blocks[id];
    rank.copies.stored(id, block.target);
    block.way = Way::kIdle;
    block.is_early = false;
    ++block.version;
  }

  // The commit of the step before takes its table first, and names copies.
  void begin_store(const State& state, std::uint32_t at, std::uint32_t id) {
    const Rank& rank = state.ranks[at];
    if (is_due(rank.step) && rank.begun < rank.step) return;
    const auto target = rank.copies.target(
        id, rank.blocks[id].is_early ? PlaneCopies::InPlace::kNo : PlaneCopies::InPlace::kYes);
    if (!target) return;
    State next = state;
    Block& block = next.ranks[at].blocks[id];
    block.way = Way::kStoring;
    block.target = *target;
    block.copies[*target] = {};  // a cut leaves anything there
    visit(std::move(next));
  }

  void move_commit(const State& state, std::uint32_t at) {
    const Rank& rank = state.ranks[at];
    State next = state;
    Rank& moved = next.ranks[at];
    if (rank.commit == Commit::kFlushing) {
      for (std::uint32_t block = 0; block < protocol_.blocks && !protocol_.skips_flush; ++block)
        moved.blocks[block].copies[rank.next.copies[block]].is_flushed = true;
      moved.commit = Commit::kWriting;
    } else if (rank.commit == Commit::kWriting) {
      moved.newest = 1 - rank.newest;
      moved.slots[moved.newest] = rank.next;
      moved.commit = Commit::kNone;
      moved.durable = static_cast<std::int8_t>(rank.next.step);
      if (protocol_.frees_without_vote) moved.copies.end_commit();
    } else if (is_due(rank.step) && rank.begun < rank.step && !rank.copies.is_committing()) {
      moved.copies.begin_commit();
      moved.begun = static_cast<std::int8_t>(rank.step);
      moved.commit = Commit::kFlushing;
      moved.next.step = moved.next.version = rank.step;
      for (std::uint32_t block = 0; block < protocol_.blocks; ++block)
        moved.next.copies[block] = moved.copies.named_by_next(block);
    } else {
      return;
    }
    visit(std::move(next));
  }

  void vote(const State& state) {
    bool all_durable = true;
    for (std::uint32_t at = 0; at < protocol_.ranks; ++at) {
      const Rank& rank = state.ranks[at];
      if (rank.step != state.voted || rank.step == protocol_.steps) return;
      const bool is_durable =
          rank.commit == Commit::kNone && (!is_due(rank.step) || rank.durable == rank.step);
      all_durable &= is_durable;
      if (!is_durable && !protocol_.votes_without_commit) return;
    }
    for (const bool is_right : {true, false}) {
      State next = state;
      ++next.voted;
      for (std::uint32_t at = 0; at < protocol_.ranks; ++at) {
        Rank& rank = next.ranks[at];
        if (all_durable && rank.copies.is_committing()) rank.copies.end_commit();
        for (std::uint32_t id = 0; id < protocol_.blocks; ++id) settle(rank, id, is_right);
      }
      visit(std::move(next));
      if (protocol_.policy != SmallPolicy::kSpeculative) return;
    }
  }

  // The assumption before the vote was right, or the update is made again.
  static void settle(Rank& rank, std::uint32_t id, bool is_right) {
    Block& block = rank.blocks[id];
    if (!block.is_early) return;
    if (block.way == Way::kTentative && is_right) return make_home(rank, id);
    if (block.way == Way::kTentative) block.way = Way::kIdle;
    if (block.way == Way::kStoring && !is_right) return;  // ends tentatively, and is made again
    block.is_early = false;
  }

  // The newest record and the one before it.
  using Leaving = std::array<Record, kCommitSlots>;

  // The records of the rank that a power cut may leave: with the new one, or without it.
  static std::vector<Leaving> leavings(const Rank& rank) {
    const Record& newest = rank.slots[rank.newest];
    std::vector<Leaving> all{{newest, rank.slots[1 - rank.newest]}};
    if (rank.commit == Commit::kWriting) all.push_back({rank.next, newest});
    return all;
  }

  void check_openable(const State& state) {
    const Rank& second = state.ranks[protocol_.ranks - 1];
    for (const Leaving& one : leavings(state.ranks[0]))
      for (const Leaving& other : leavings(second))
        if (!opens(state, {&one, &other})) outcome_.unopenable = text_of(state);
  }

  bool opens(const State& state, const std::array<const Leaving*, kRanksMax>& left) const {
    std::vector<CommitOffer> offers;
    for (std::uint32_t at = 0; at < protocol_.ranks; ++at) {
      const auto& [newest, older] = *left[at];
      CommitOffer offer{.newest = newest.step, .older = std::nullopt};
      if (older.step != kNoStep) offer.older = older.step;
      offers.push_back(offer);
    }
    const auto step = common_step(offers);
    if (!step) return false;
    const auto record_of = [&](std::uint32_t at) {
      return *std::ranges::find(*left[at], *step, &Record::step);
    };
    for (std::uint32_t at = 0; at < protocol_.ranks; ++at) {
      const Record record = record_of(at);
      if (record.version != record_of(0).version) return false;
      for (std::uint32_t id = 0; id < protocol_.blocks; ++id) {
        const Copy& copy = state.ranks[at].blocks[id].copies[record.copies[id]];
        if (copy.version != record.version || !copy.is_flushed) return false;
      }
    }
    return true;
  }

  // Copies are numbered as they are met: which of them is which makes no difference.
  std::string key_of(const State& state) const {
    std::string key(1, static_cast<char>(state.voted));
    const auto add = [&key](auto... values) { (key.push_back(static_cast<char>(values)), ...); };
    for (std::uint32_t at = 0; at < protocol_.ranks; ++at) {
      const Rank& rank = state.ranks[at];
      add(rank.step, rank.begun, rank.durable, rank.commit, rank.copies.is_committing());
      add(rank.newest);
      for (const Record& record : rank.slots) add(record.step, record.version);
      add(rank.commit == Commit::kNone ? kNoStep : rank.next.step);
      for (std::uint32_t id = 0; id < protocol_.blocks; ++id) {
        const Block& block = rank.blocks[id];
        add(block.version, block.way, block.is_early);
        std::array<std::uint8_t, 3> numbers{kNoStep, kNoStep, kNoStep};
        std::uint8_t met = 0;
        for (const std::uint8_t copy :
             {rank.copies.home(id), rank.copies.named(id), rank.copies.named_by_next(id),
              rank.slots[0].copies[id], rank.slots[1].copies[id],
              rank.commit == Commit::kNone ? PlaneCopies::kNone : rank.next.copies[id],
              block.way == Way::kStoring || block.way == Way::kTentative ? block.target
                                                                         : PlaneCopies::kNone,
              std::uint8_t{0}, std::uint8_t{1}, std::uint8_t{2}}) {
          if (copy == PlaneCopies::kNone) {
            add(copy);
            continue;
          }
          if (numbers[copy] == kNoStep) {
            numbers[copy] = met++;
            add(block.copies[copy].version, block.copies[copy].is_flushed);
          }
          add(numbers[copy]);
        }
      }
    }
    return key;
  }

  std::string text_of(const State& state) const {
    std::string text = fmt::format("vote {}", state.voted);
    for (std::uint32_t at = 0; at < protocol_.ranks; ++at) {
      const Rank& rank = state.ranks[at];
      text += fmt::format("; rank {}: step {}, commit {} begun, {} durable, stage {}, blocks", at,
                          rank.step, rank.begun, rank.durable, static_cast<int>(rank.commit));
      for (std::uint32_t id = 0; id < protocol_.blocks; ++id)
        text += fmt::format(" v{} way {} home {}", rank.blocks[id].version,
                            static_cast<int>(rank.blocks[id].way), rank.copies.home(id));
    }
    return text;
  }

  const SmallProtocol protocol_;
  SmallOutcome outcome_;
  std::unordered_set<std::string> seen_;
  std::vector<State> waiting_;
  std::size_t ways_ = 0;
};

}  // namespace

SmallOutcome explore(const SmallProtocol& protocol) {
  return Explorer(protocol).run();
}

}  // namespace sluice::test
