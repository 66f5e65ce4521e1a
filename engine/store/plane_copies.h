// The copies of each plane on storage. An object of this class knows three things for each plane:
// its home, the copies that commits name, and the copy for the next write. If a commit names data,
// this data is not overwritten until every rank has a later commit. Because of this rule, the
// working files themselves are a checkpoint.
//
// Thread rule: one thread at a time. In an engine, this is the scheduler's thread.
// Invariants: a copy keeps its content while a commit names this copy. The home keeps its content,
// too. There are at most two commits: the valid commit and the commit under way.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace sluice {

class PlaneCopies {
 public:
  static constexpr std::uint8_t kNone = 0xff;

  // Every plane gets `copy_count` copies. A count of 1 is for planes that are never stored again.
  PlaneCopies(std::uint32_t plane_count, std::uint8_t copy_count);
  // Plane i gets copy_counts[i] copies.
  explicit PlaneCopies(std::span<const std::uint8_t> copy_counts);

  std::uint32_t plane_count() const { return static_cast<std::uint32_t>(planes_.size()); }
  std::uint8_t home(std::uint32_t plane) const { return planes_[plane].home; }
  // Returns the copy for the table of the next record. The result is the copy that the commit under
  // way names. If no commit is under way, the result is the copy that the valid commit names.
  std::uint8_t named_by_next(std::uint32_t plane) const { return planes_[plane].next; }
  std::uint8_t named(std::uint32_t plane) const { return planes_[plane].counts; }

  // The caller says whether a write may replace the home itself.
  enum class InPlace : std::uint8_t { kNo, kYes };
  // The copy that may be written next. Usually, the result is a copy that is not the home and that
  // no commit names. If no other copy is free, the result may be the home itself. The result is the
  // home only if `in_place` is kYes and no commit names the home. A caller that passes kYes must
  // make sure that no read of the home is under way. If the result is empty, the write has to wait
  // for a commit.
  std::optional<std::uint8_t> target(std::uint32_t plane, InPlace in_place) const;
  // Must be called when a write to `copy` has ended. The call makes `copy` the home.
  // Requires: `copy` came from target().
  void stored(std::uint32_t plane, std::uint8_t copy);

  // Called when a commit begins. The commit names the home of every plane.
  // Requires: no commit is under way.
  void begin_commit();
  bool is_committing() const { return is_committing_; }
  // Called when the commit is valid on every rank. If only the previous commit names a copy, the
  // copy becomes free.
  // Requires: a commit is under way.
  void end_commit();

  // Called when a store is opened. `copy` is the copy that the store's valid record names for
  // `plane`.
  void restore(std::uint32_t plane, std::uint8_t copy);

  bool operator==(const PlaneCopies&) const = default;

 private:
  struct Plane {
    std::uint8_t count = 1;  // of copies
    std::uint8_t home = 0;
    std::uint8_t counts = kNone;  // the copy that the valid commit names
    std::uint8_t next = kNone;    // the copy that the commit under way names
    bool operator==(const Plane&) const = default;
  };

  bool is_named(const Plane& plane, std::uint8_t copy) const {
    return plane.counts == copy || plane.next == copy;
  }

  std::vector<Plane> planes_;
  bool is_committing_ = false;
};

}  // namespace sluice
