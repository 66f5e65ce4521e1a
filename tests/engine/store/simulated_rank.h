// One rank of store_simulation.h: its drive, what it stores, its commits, and how it opens again.
// Thread rule: one thread.
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

  // A life: from opening to the next cut. The first one begins with the state of step 0, committed.
  void create();
  // Opening, in its three parts. Throws Error, and PowerCut after `requests`.
  CommitOffer open(std::uint64_t requests);
  void settle(std::uint64_t step, std::uint64_t requests);
  // The fault of the state that settle() has left, if there is one.
  std::string find_loss();
  // Alters one bit of one twin. Requires: settled.
  void flip_record_bit(std::uint64_t random);

  // Moves something on, by `random`, where anything can.
  void advance(std::uint64_t random);
  // The vote of the next step: all of the last one is stored, and its commit durable here.
  bool may_vote() const;
  // All have voted.
  void begin_step();

  void end(bool is_power_cut);

  std::uint64_t step() const { return step_; }             // that is whole here
  std::uint64_t durable_step() const { return durable_; }  // whose commit has ended here
  std::uint64_t begun_step() const { return begun_; }      // whose commit has begun here
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
  std::vector<std::uint64_t> versions_;         // of the home
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
