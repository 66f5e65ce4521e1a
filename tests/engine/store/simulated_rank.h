// One rank of the simulation in store_simulation.h. The rank has a drive, stores data, and makes
// commits. After a power cut, the rank can open its store again. Thread rule: one thread.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/store/commit_opening.h"
#include "engine/store/plane_copies.h"
#include "tests/engine/store/store_simulation.h"
#include "tests/support/power_cut_disk.h"

namespace sluice::test {

class SimulatedRank {
 public:
  SimulatedRank(const SimulationOptions& options, std::uint32_t rank);

  // Begins the first life, and commits the state of step 0. A life lasts from an opening to the
  // next power cut.
  void create();
  // An opening has two parts. The call open() returns the steps that this rank offers. The call
  // settle() goes back to `step` and repairs the records. If one of the calls fails, the call
  // throws Error. After `requests` transfers, the call throws PowerCut.
  CommitOffer open(std::uint64_t requests);
  void settle(std::uint64_t step, std::uint64_t requests);
  // Returns a text about a fault in the state that settle() has left. The text is empty if there is
  // no fault.
  std::string find_loss();
  // Flips one bit in one twin of the newest record. Requires: settle() was called.
  void flip_record_bit(std::uint64_t random);

  // If any activity can advance, the function advances one activity. `random` chooses this
  // activity.
  void advance(std::uint64_t random);
  // Returns whether this rank may vote for the next step. The rank may vote if the last step is
  // stored completely and the last step's commit is durable on this rank.
  bool may_vote() const;
  // This function is called when all ranks have voted.
  void begin_step();

  void end(bool is_power_cut);

  std::uint64_t step() const { return step_; }             // the step that is complete on this rank
  std::uint64_t durable_step() const { return durable_; }  // the step whose commit has ended here
  std::uint64_t begun_step() const { return begun_; }      // the step whose commit has begun here
  bool is_writing_record() const { return !writer_->is_idle(); }
  bool went_back() const { return went_back_; }

 private:
  static constexpr std::uint64_t kPlaneBytes = 4096;
  static constexpr std::uint64_t kSlotBytes = 8192;
  static constexpr std::uint32_t kDataFiles = 2;

  struct Store {
    SimulatedRank* rank = nullptr;
    IoRequest request;
    std::array<std::byte, kPlaneBytes> data{};
    std::uint32_t plane = 0;
    std::uint8_t copy = 0;
    bool is_under_way = false;
  };

  bool mutates(Mutation mutation) const { return options_.mutation == mutation; }
  bool is_in_memory(std::uint32_t plane) const {
    return plane >= options_.planes - options_.planes_in_memory;
  }
  bool is_due(std::uint64_t step) const { return step % options_.commit_every == 0; }
  CommitExtent extent(std::uint32_t plane, std::uint8_t copy) const;
  void fill(std::span<std::byte> target, std::uint32_t plane, std::uint64_t version) const;
  bool wants_store(std::uint32_t plane) const;
  bool may_store(std::uint32_t plane) const;
  void start_store(std::uint32_t plane);
  void stored(Store& store);
  void finish_step_if_whole();
  bool may_commit() const;
  void begin_commit();
  void commit_ended(const std::optional<Error>& failure);
  CommitRecord record() const;
  CommitSequence sequence() const;
  void begin_life();

  const SimulationOptions options_;
  const std::uint32_t rank_;
  PowerCutDisk disk_;
  CommitFiles files_;

  // State of one life.
  std::optional<CommitOpening> opening_;
  std::unique_ptr<CommitWriter> writer_;
  PlaneCopies copies_{1, 1};
  std::vector<std::unique_ptr<Store>> stores_;  // by plane
  std::vector<std::uint64_t> versions_;         // the version at the home
  std::deque<std::function<void()>> messages_;
  std::uint64_t step_ = 0;
  std::uint64_t voted_ = 0;  // the step whose update may be stored
  std::uint64_t begun_ = 0;
  std::uint64_t durable_ = 0;
  std::uint64_t committing_ = 0;
  std::uint32_t next_slot_ = 0;
  std::uint64_t next_generation_ = 1;
  bool went_back_ = false;
};

}  // namespace sluice::test
