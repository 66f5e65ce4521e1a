// The part of the oracle that updates blocks: turns, lanes, reads, updates and writes.
#include <algorithm>

#include "tests/engine/bound/oracle_jobs.h"

namespace sluice::test {

bool Oracle::needs_lane(int block) const {
  return !c_.parameters_in_ram[block] || !c_.record_in_ram[block] ||
         c_.gradients_on_storage[unit_of_[block]];
}

bool Oracle::is_home(const Turn& turn) const {
  return done(turn.write_record) && done(turn.write_parameters) && done(turn.adam);
}

bool Oracle::is_eager(int block) const {
  return c_.policy == OverlapPolicy::kEager ||
         (c_.policy == OverlapPolicy::kSpeculative && !c_.parameters_in_ram[block] &&
          !c_.record_in_ram[block] && !c_.gradients_on_storage[unit_of_[block]]);
}

bool Oracle::may_update(int step, int block) const {
  return is_eager(block) ? all_done(drained_[step][unit_of_[block]]) : norm_known(step);
}

bool Oracle::wants_turn(int step, int block) const {
  return !c_.on_device[unit_of_[block]] && !started(pass_[step][block].grant);
}

int Oracle::next_turn(int step) const {
  const bool known = norm_known(step);
  if (c_.policy == OverlapPolicy::kSerial && !known) return -1;
  if (known || c_.policy == OverlapPolicy::kDeferred) {
    for (int block = 0; block < blocks_; ++block) {
      if (wants_turn(step, block)) return block;
    }
    return -1;
  }
  for (const OracleUse& use : c_.uses) {
    if (!use.is_backward) continue;
    for (int i = 0; i < c_.unit_blocks[use.unit]; ++i) {
      const int block = first_block_[use.unit] + i;
      if (is_eager(block) && wants_turn(step, block)) return block;
    }
  }
  return -1;
}

bool Oracle::may_be_granted(int step, int block) const {
  int lanes_taken = 0;
  for (int s = 0; s <= step; ++s) {
    for (int b = 0; b < blocks_; ++b) {
      if (s < step && wants_turn(s, b)) return false;  // the pass before comes first
      if (needs_lane(b) && !wants_turn(s, b) && !is_home(pass_[s][b])) ++lanes_taken;
    }
  }
  return next_turn(step) == block &&
         (c_.parameters_in_ram[block] || slots_.holds(block) || slots_.has_room_for_a_lane()) &&
         (!needs_lane(block) || lanes_taken < c_.lanes) &&
         (step == 0 || is_home(pass_[step - 1][block]));
}

void Oracle::list_pass() {
  pass_.assign(steps_, std::vector<Turn>(blocks_));
  adams_.assign(steps_, std::vector<std::vector<Id>>(c_.unit_blocks.size()));
  for (int step = 0; step < steps_; ++step) {
    for (int block = 0; block < blocks_; ++block) list_turn(step, block);
    for (int block = 0; block < blocks_; ++block) list_device_update(step, block);
  }
  list_stagings();
}

void Oracle::list_device_update(int step, int block) {
  const int unit = unit_of_[block];
  if (!c_.on_device[unit]) return;
  long turn = unit;
  for (int use = 0; use < uses_ && is_eager(block); ++use)
    if (c_.uses[use].unit == unit) turn = use;
  device_updates_[step][unit].push_back(
      add({.line = kDeviceUpdate,
           .duration = c_.device_adam,
           .may_start = [=, this] { return may_update(step, block); },
           .rank = {step, turn, block}}));
}

void Oracle::list_turn(int step, int block) {
  if (c_.on_device[unit_of_[block]]) return;
  Turn& turn = pass_[step][block];
  const bool parameters_in_ram = c_.parameters_in_ram[block];
  const bool record_in_ram = c_.record_in_ram[block];
  const auto is_granted = [this, grant = &turn.grant] { return started(*grant); };
  turn.record = add({.line = kRead,
                     .duration = record_in_ram ? 0 : c_.read_record,
                     .latency = record_in_ram ? 0 : c_.latency,
                     .may_start = is_granted,
                     .event = {OracleWork::kReadRecord, step, block}});
  turn.parameters = add({.line = kRead,
                         .duration = c_.read_parameters,
                         .latency = c_.latency,
                         .may_start =
                             [=, this] {
                               const Turn& t = pass_[step][block];
                               return is_granted() && t.arrival == t.parameters;
                             },
                         .event = {OracleWork::kReadParameters, step, block}});
  const bool on_storage = c_.gradients_on_storage[unit_of_[block]];
  turn.gradients =
      add({.line = kRead,
           .duration = on_storage ? c_.read_gradients : 0,
           .latency = on_storage ? c_.latency : 0,
           .may_start = [=, this] { return is_granted() && may_update(step, block); }});
  turn.adam = c_.streamed == 0 ? add({.line = kCpu,
                                      .duration = c_.adam,
                                      .may_start = [=, this] { return is_ready(step, block); }})
                               : list_streamed(step, block);
  adams_[step][unit_of_[block]].push_back(turn.adam);
  if (c_.streamed == 0) jobs_[turn.adam].event = {OracleWork::kAdam, step, block};
  const auto is_updated = [=, this] { return done(pass_[step][block].adam); };
  turn.write_record = add({.line = storage(kWrite),
                           .duration = record_in_ram ? 0 : c_.write_record,
                           .latency = record_in_ram ? 0 : c_.latency,
                           .may_start = is_updated,
                           .event = {OracleWork::kWriteRecord, step, block}});
  turn.write_parameters = add({.line = storage(kWrite),
                               .duration = parameters_in_ram ? 0 : c_.write_parameters,
                               .latency = parameters_in_ram ? 0 : c_.latency,
                               .may_start = is_updated,
                               .event = {OracleWork::kWriteParameters, step, block}});
  for (const Id id : {turn.adam, turn.write_record, turn.write_parameters}) {
    jobs_[id].on_end = [=, this] {
      Turn& t = pass_[step][block];
      if (t.is_home || !is_home(t)) return;
      t.is_home = true;
      if (!parameters_in_ram) come_home_.emplace_back(step, block);
    };
  }
  turn.grant = add({.may_start = [=, this] { return may_be_granted(step, block); },
                    .on_start = [=, this] { grant(step, block); }});
}

bool Oracle::is_ready(int step, int block) const {
  const Turn& t = pass_[step][block];
  return t.grant >= 0 && started(t.grant) && done(t.record) && done(t.arrival) &&
         done(t.gradients) && may_update(step, block);
}

long Oracle::order_of(int step, int block) const {
  return norm_known(step) ? static_cast<long>(step) * blocks_ + block : pass_[step][block].place;
}

JobTable::Id Oracle::list_streamed(int step, int block) {
  Turn& turn = pass_[step][block];
  turn.up = add({.line = kUp,
                 .duration = 7 * c_.copy_up,  // record, parameters, gradients
                 .may_start = [=, this] { return started(pass_[step][block].staged); }});
  turn.on_device = add({.line = kDeviceUpdate, .duration = c_.device_adam, .may_start = [=, this] {
                          return done(pass_[step][block].up);
                        }});
  return add({.line = kDown, .duration = 6 * c_.copy_down, .may_start = [=, this] {
                const Turn& t = pass_[step][block];
                return started(t.up) && done(t.up) && started(t.on_device) && done(t.on_device);
              }});
}

void Oracle::list_stagings() {
  for (int step = 0; step < steps_ && c_.streamed != 0; ++step) {
    for (int block = 0; block < blocks_; ++block) {
      if (c_.on_device[unit_of_[block]]) continue;
      pass_[step][block].staged =
          add({.may_start = [=, this] { return may_be_staged(step, block); }});
    }
  }
}

bool Oracle::may_be_staged(int step, int block) const {
  if (!is_ready(step, block)) return false;
  int taken = 0;
  for (int s = 0; s < steps_; ++s) {
    for (int b = 0; b < blocks_; ++b) {
      const Turn& other = pass_[s][b];
      if (other.staged < 0) continue;
      if (started(other.staged)) {
        if (!done(other.adam)) ++taken;
      } else if (is_ready(s, b) && order_of(s, b) < order_of(step, block)) {
        return false;
      }
    }
  }
  return taken < c_.streamed;
}

void Oracle::grant(int step, int block) {
  Turn& turn = pass_[step][block];
  const long place = granted_++;
  jobs_[turn.record].rank = {1, place, 0};
  jobs_[turn.parameters].rank = {1, place, 1};
  jobs_[turn.gradients].rank = {1, place, 2};
  turn.place = place;
  if (c_.streamed == 0)
    jobs_[turn.adam].set_rank = [=, this, &job = jobs_[turn.adam]] {
      job.rank = {1, order_of(step, block), 0};
    };
  if (c_.streamed != 0) {
    jobs_[turn.up].rank = {1, place, 0};
    jobs_[turn.on_device].rank = {1'000'000, place, 0};
    jobs_[turn.adam].rank = {2, place, 0};
  }
  jobs_[turn.write_record].rank = {2, place, 0};
  jobs_[turn.write_parameters].rank = {2, place, 1};
  if (c_.parameters_in_ram[block]) return;
  turn.arrival = slots_.join(block, true, turn.parameters);
}

}  // namespace sluice::test
