// The jobs of the oracle in schedule_oracle.h. The class lists the jobs of several steps, and says
// when each job may start. This file is a part of schedule_oracle.cc.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "tests/engine/bound/job_table.h"
#include "tests/engine/bound/oracle_slots.h"

namespace sluice::test {

class Oracle final : public JobTable {
 public:
  Oracle(const OracleCase& given, int steps) : c_(given), steps_(steps) {
    for (std::size_t unit = 0; unit < c_.unit_blocks.size(); ++unit) {
      first_block_.push_back(static_cast<int>(unit_of_.size()));
      unit_of_.insert(unit_of_.end(), static_cast<std::size_t>(c_.unit_blocks[unit]),
                      static_cast<int>(unit));
    }
    blocks_ = static_cast<int>(unit_of_.size());
    uses_ = static_cast<int>(c_.uses.size());
    slots_ = OracleSlots(blocks_, c_.slots, c_.kept_slots, c_.lanes);
    device_updates_.assign(steps_, std::vector<std::vector<Id>>(c_.unit_blocks.size()));
    list_fetches();
    list_computation();
    list_pass();
  }

  std::vector<long> run() {
    std::vector<long> begins{0};
    while (static_cast<int>(begins.size()) < steps_) {
      start_what_may();
      if (is_open(static_cast<int>(begins.size())))
        begins.push_back(now_);
      else
        advance();
    }
    return begins;
  }
  const std::vector<OracleEvent>& events() const { return events_; }

 private:
  Line storage(Line line) const { return c_.half_duplex && line == kWrite ? kRead : line; }

  // --- When a step may begin ---
  bool norm_known(int step) const {
    if (step < 0) return true;
    return all_done(norms_[step]);
  }
  bool is_open(int step) const {
    if (step == 0) return true;
    if (c_.policy != OverlapPolicy::kSerial || !norm_known(step - 1)) return norm_known(step - 1);
    return std::ranges::all_of(pass_[step - 1], [&](const Turn& turn) { return is_home(turn); }) &&
           std::ranges::all_of(device_updates_[step - 1],
                               [&](const std::vector<Id>& unit) { return all_done(unit); });
  }

  void list_fetches() {
    for (int step = 0; step < steps_; ++step) {
      copies_.emplace_back(uses_);
      fetches_of_.emplace_back(uses_);
      for (int use = 0; use < uses_; ++use) {
        if (!c_.uses[use].fetches) continue;
        const int unit = c_.uses[use].unit;
        for (int i = 0; i < c_.unit_blocks[unit]; ++i)
          list_fetch(step, use, first_block_[unit] + i);
      }
    }
  }
  void list_fetch(int step, int use, int block) {
    const auto number = fetches_.size();
    const bool in_ram = c_.parameters_in_ram[block];
    fetches_.push_back({});
    fetches_[number].issue = add({.may_start = [=, this] {
      return (number == 0 || started(fetches_[number - 1].issue)) && is_open(step) &&
             places_are_released(step, use) && (step == 0 || done(pass_[step - 1][block].adam)) &&
             (in_ram || slots_.holds(block) || slots_.has_room_for_a_fetch());
    }});
    fetches_of_[step][use].push_back(number);
    const Id read = add({.line = kRead,
                         .duration = c_.read_parameters,
                         .latency = c_.latency,
                         .may_start =
                             [=, this] {
                               const Fetch& fetch = fetches_[number];
                               return started(fetch.issue) && fetch.arrival == fetch.read;
                             },
                         .rank = {0, static_cast<long>(number), 0},
                         .event = {OracleWork::kReadParameters, step, block}});
    fetches_[number].read = read;
    jobs_[fetches_[number].issue].on_start = [=, this] {
      if (in_ram) return;
      fetches_[number].arrival = slots_.join(block, false, read);
    };
    const bool keep = c_.uses[use].is_backward && (c_.policy == OverlapPolicy::kEager ||
                                                   c_.policy == OverlapPolicy::kSpeculative);
    fetches_[number].copy = add(
        {.line = kUp,
         .duration = c_.copy_up,
         .may_start =
             [=, this] {
               const Fetch& fetch = fetches_[number];
               const auto& evicted = c_.uses[use].evicted_uses;
               return (number == 0 || done(fetches_[number - 1].copy)) && started(fetch.issue) &&
                      done(fetch.arrival) &&
                      std::ranges::all_of(evicted, [&](int e) { return done(computed_[step][e]); });
             },
         .rank = {0, static_cast<long>(number), 0},
         .on_end =
             [=, this] {
               if (!in_ram) slots_.leave(block, false, keep);
             }});
    copies_[step][use].push_back(fetches_[number].copy);
  }

  // Leases end in the order of the uses. A lease can end when the parameters of the lease's unit
  // are updated and have arrived in host memory.
  bool places_are_released(int step, int use) const {
    const auto& evicted = c_.uses[use].evicted_uses;
    for (int before = 0; !evicted.empty() && before <= std::ranges::max(evicted); ++before) {
      if (!is_updated_at_home(step, c_.uses[before].unit)) return false;
      for (const std::size_t f : fetches_of_[step][before])
        if (!started(fetches_[f].issue) || !done(fetches_[f].arrival)) return false;
    }
    return true;
  }
  bool is_updated_at_home(int step, int unit) const {
    return step == 0 || (all_done(device_updates_[step - 1][unit]) &&
                         (!c_.leased_at_home[unit] || all_done(adams_[step - 1][unit])));
  }

  void settle() override {
    for (const auto& [step, block] : come_home_)
      slots_.leave(block, true, c_.policy != OverlapPolicy::kSerial && norm_known(step));
    come_home_.clear();
    slots_.settle();
  }

  void list_computation() {
    for (int step = 0; step < steps_; ++step) {
      computed_.emplace_back();
      drained_.emplace_back(c_.unit_blocks.size());
      norms_.emplace_back();
      std::vector<Id> drains;
      for (int use = 0; use < uses_; ++use) {
        const auto& [unit, is_backward, fetches, evicted] = c_.uses[use];
        const Id before = use == 0 ? -1 : computed_[step][use - 1];
        const bool is_there = c_.is_in_set(unit);  // such a gradient takes no slot
        // Gradients may leave their slots in any order.
        const auto held = is_backward && !is_there ? drains : std::vector<Id>();
        const auto may_start = [=, this] {
          return is_open(step) && done(before) && undone(held) < c_.gradient_slots &&
                 is_updated_at_home(step, unit) && all_done(copies_[step][use]);
        };
        const Id computed = add({.line = kComputation,
                                 .duration = (is_backward ? c_.backward : c_.forward)[unit],
                                 .may_start = may_start,
                                 .rank = {step, use, 0}});
        computed_[step].push_back(computed);
        if (!is_backward) continue;
        if (c_.on_device[unit]) {  // the gradient needs no copy
          drained_[step][unit] = {drains.emplace_back(norms_[step].emplace_back(computed))};
          continue;
        }
        const long count = c_.unit_blocks[unit];
        // If some gradients go to storage, the gradients of the units leave the device one after
        // another.
        const std::vector<Id> turn = any_on_storage() ? last_ : std::vector<Id>{};
        if (c_.gradients_on_storage[unit]) {
          drains.push_back(list_spill(step, use, unit, computed, turn));
          continue;
        }
        const Id drain = add({.line = is_there ? kNone : kDown,
                              .duration = is_there ? 0 : count * c_.copy_down,
                              .may_start = [=, this] { return done(computed) && all_done(turn); },
                              .rank = {0, step, use}});
        if (!is_there) drains.push_back(drain);
        drained_[step][unit] = last_ = {drain};
        norms_[step].push_back(add({.line = kCpu,
                                    .duration = count * c_.norm,
                                    .may_start = [=, this] { return done(drain); },
                                    .rank = {0, step, use}}));
      }
    }
  }

  // --- Gradients that go to storage, block by block ---
  bool any_on_storage() const { return std::ranges::count(c_.gradients_on_storage, true) != 0; }
  // Returns the last copy. When this copy ends, the gradient has left its slot.
  Id list_spill(int step, int use, int unit, Id computed, const std::vector<Id>& turn) {
    std::vector<Id> writes;
    Id copy = -1;
    for (long i = 0; i < c_.unit_blocks[unit]; ++i) {
      // `before` is the job that writes the previous block in this staging slot.
      const Id before = i < c_.staging ? -1 : writes[static_cast<std::size_t>(i - c_.staging)];
      copy =
          add({.line = kDown,
               .duration = c_.copy_down,
               .may_start = [=, this] { return done(computed) && all_done(turn) && done(before); },
               .rank = {1, use, i}});
      const Id norm = add({.line = kCpu,
                           .duration = c_.norm,
                           .may_start = [=, this] { return done(copy); },
                           .rank = {0, 1'000'000 + use, i}});
      writes.push_back(add({.line = storage(kWrite),
                            .duration = c_.write_gradients,
                            .latency = c_.latency,
                            .may_start = [=, this] { return done(norm); },
                            .rank = {2, 1'000'000'000 + use, i}}));
    }
    last_ = drained_[step][unit] = writes;
    norms_[step].insert(norms_[step].end(), writes.begin(), writes.end());
    return copy;
  }

  // --- The pass (schedule_oracle_pass.cc) ---
  struct Turn {
    Id gradients = -1;
    Id grant = -1, record = -1, parameters = -1, adam = -1, write_record = -1;
    Id write_parameters = -1;
    Id staged = -1, up = -1, on_device = -1;  // the jobs of an update on the device
    long place = 0;
    Id arrival = -1;  // of the block's parameters
    bool is_home = false;
  };
  bool needs_lane(int block) const;
  bool is_home(const Turn& turn) const;
  bool is_eager(int block) const;
  bool may_update(int step, int block) const;
  bool wants_turn(int step, int block) const;
  // Returns the block that has the next turn, or -1.
  int next_turn(int step) const;
  bool may_be_granted(int step, int block) const;
  void list_pass();
  // Lists the update of a block that is on the device. Eager updates run in the order of the units'
  // last uses. Other updates run in the order of the units.
  void list_device_update(int step, int block);
  void list_turn(int step, int block);
  bool is_ready(int step, int block) const;
  // Returns the place of a ready block in the order of all ready blocks.
  long order_of(int step, int block) const;
  // --- Blocks that are on the device only during their update ---
  // Returns the last job of the update.
  Id list_streamed(int step, int block);
  // Lists the jobs that give ready blocks a place on the device. If several jobs can start at the
  // same moment, jobs that give places start last.
  void list_stagings();
  bool may_be_staged(int step, int block) const;
  void grant(int step, int block);

  struct Fetch {
    Id issue = -1, read = -1, arrival = -1, copy = -1;
  };

  const OracleCase& c_;
  int steps_;
  int blocks_ = 0;
  int uses_ = 0;
  std::vector<int> unit_of_, first_block_;
  std::vector<Fetch> fetches_;
  std::vector<std::vector<std::vector<std::size_t>>> fetches_of_;  // by step, use
  std::vector<std::vector<std::vector<Id>>> copies_;               // by step, use
  std::vector<std::vector<Id>> computed_, norms_;
  std::vector<std::vector<std::vector<Id>>> drained_;  // by step, unit
  std::vector<Id> last_;                               // the jobs that end the previous drain
  std::vector<std::vector<Turn>> pass_;                // by step, block
  std::vector<std::vector<std::vector<Id>>> device_updates_, adams_;  // by step, unit
  OracleSlots slots_{0, 0, 0, 0};
  std::vector<std::pair<int, int>> come_home_;  // step, block
  long granted_ = 0;
};

}  // namespace sluice::test
