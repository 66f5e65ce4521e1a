// The copies of each plane. An object knows which copy is home, which copies commits name, and
// which copy a store may go to. Data that a commit names is not overwritten until a later commit
// has replaced that commit on every rank. This rule makes the working files a checkpoint.
//
// Thread rule: one thread at a time; in an engine, the scheduler's thread.
// Invariants: a named copy keeps the content that it had when a commit named it, and the home keeps
// its content, too. There are at most two commits: the valid one and the one under way.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace sluice {

class PlaneCopies {
 public:
  static constexpr std::uint8_t kNone = 0xff;

  // `copy_count` applies to every plane. A count of 1 is for planes that are never stored again.
  PlaneCopies(std::uint32_t plane_count, std::uint8_t copy_count);
  // Does the same, with a count for each plane.
  explicit PlaneCopies(std::span<const std::uint8_t> copy_counts);

  std::uint32_t plane_count() const { return static_cast<std::uint32_t>(planes_.size()); }
  std::uint8_t home(std::uint32_t plane) const { return planes_[plane].home; }
  // The copy for the record's table. If a commit is under way, the copy is the one that this commit
  // names. If no commit is under way, the copy is the one that the valid commit names.
  std::uint8_t named_by_next(std::uint32_t plane) const { return planes_[plane].next; }
  std::uint8_t named(std::uint32_t plane) const { return planes_[plane].counts; }

  // Whether a store may go to the home itself.
  enum class InPlace : std::uint8_t { kNo, kYes };
  // The copy that a store may go to. Such a copy is neither home nor named. If no such copy exists,
  // kYes allows the home itself, provided that no commit names the home. In this case, no read of
  // the home may be under way. If the result is empty, the store has to wait for a commit.
  std::optional<std::uint8_t> target(std::uint32_t plane, InPlace in_place) const;
  // Called when a store to `copy` has ended, so that `copy` becomes home.
  // Requires: `copy` came from target().
  void stored(std::uint32_t plane, std::uint8_t copy);

  // Called when a commit begins. The commit names every home.
  // Requires: no commit is under way.
  void begin_commit();
  bool is_committing() const { return is_committing_; }
  // Called when the commit is valid on every rank. A copy becomes free if only the previous commit
  // names it.
  // Requires: a commit is under way.
  void end_commit();

  // Called when a store is opened, if the store's valid record names `copy`.
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
