// The parameter slots of schedule_oracle.cc. For each slot, this class tracks the users of the
// slot, and the job that fills the slot. The class also knows whether the block stays in the slot
// after the last user has left. If several users leave at the same instant, they leave in a fixed
// order. This order does not depend on the order of the calls.
#pragma once

#include <algorithm>
#include <compare>
#include <vector>

namespace sluice::test {

class OracleSlots {
 public:
  OracleSlots(int blocks, int slots, int kept_max, int lanes)
      : slots_(static_cast<std::size_t>(blocks)),
        kept_max_(kept_max),
        lanes_(lanes),
        free_(slots) {}

  bool holds(int block) const { return slots_[block].users + slots_[block].kept > 0; }
  bool has_room_for_a_lane() const { return free_ > 0; }
  bool has_room_for_a_fetch() const { return free_ > lanes_ - std::min(lanes_, lane_users_); }

  // Returns the job that fills the slot. If the block was in no slot before, the result is `job`.
  int join(int block, bool is_lane, int job) {
    Slot& slot = slots_[block];
    if (!holds(block)) {
      --free_;
      slot.filled_by = job;
    }
    kept_ -= slot.kept;
    slot.kept = 0;
    ++slot.users;
    lane_users_ += is_lane ? 1 : 0;
    return slot.filled_by;
  }
  void leave(int block, bool is_lane, bool keep) { leaving_.push_back({is_lane, block, keep}); }
  void settle() {
    std::ranges::sort(leaving_);
    for (const Leaving& user : leaving_) {
      Slot& slot = slots_[user.block];
      lane_users_ -= user.is_lane ? 1 : 0;
      if (--slot.users > 0) continue;
      slot.kept = user.keep && kept_ < kept_max_ && free_ + lane_users_ >= lanes_ ? 1 : 0;
      kept_ += slot.kept;
      free_ += 1 - slot.kept;
    }
    leaving_.clear();
  }

 private:
  struct Slot {
    int users = 0, kept = 0;
    int filled_by = -1;
  };
  struct Leaving {
    bool is_lane;
    int block;
    bool keep;
    auto operator<=>(const Leaving&) const = default;
  };

  std::vector<Slot> slots_;  // by block
  std::vector<Leaving> leaving_;
  int kept_max_, lanes_;
  int free_, kept_ = 0, lane_users_ = 0;
};

}  // namespace sluice::test
