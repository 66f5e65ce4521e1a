// Which copy of each plane is home, which ones commits name, and which one a store may go to. The
// rule that makes the working files a checkpoint: nothing that a commit names is ever overwritten,
// until a later commit has taken its place on every rank.
//
// Thread rule: none of its own; the scheduler's thread in an engine.
// Invariants: a named copy holds what it held when it was named, and so does the home; at most two
// commits are held, the one that counts and the one under way.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace sluice {

class PlaneCopies {
 public:
  static constexpr std::uint8_t kNone = 0xff;

  // `copy_count`: of every plane; 1 where it is never stored again.
  PlaneCopies(std::uint32_t plane_count, std::uint8_t copy_count);
  // Likewise, of each plane.
  explicit PlaneCopies(std::span<const std::uint8_t> copy_counts);

  std::uint32_t plane_count() const { return static_cast<std::uint32_t>(planes_.size()); }
  std::uint8_t home(std::uint32_t plane) const { return planes_[plane].home; }
  // The copy that the commit under way names, or the one that counts: for the record's table.
  std::uint8_t named_by_next(std::uint32_t plane) const { return planes_[plane].next; }
  std::uint8_t named(std::uint32_t plane) const { return planes_[plane].counts; }

  // The copy that a store may go to: one that is neither home nor named; else, where `in_place` is
  // given, the home itself if no commit names it (then nobody may be reading it). None: the store
  // has to wait for a commit.
  enum class InPlace : std::uint8_t { kNo, kYes };
  std::optional<std::uint8_t> target(std::uint32_t plane, InPlace in_place) const;
  // A store to `copy` has ended: it is home.
  // Requires: target() gave it.
  void stored(std::uint32_t plane, std::uint8_t copy);

  // A commit begins: it names every home.
  // Requires: none is under way.
  void begin_commit();
  bool is_committing() const { return is_committing_; }
  // It counts, on every rank: what the one before names alone is free.
  // Requires: one is under way.
  void end_commit();

  // At opening: the record that counts names `copy`.
  void restore(std::uint32_t plane, std::uint8_t copy);

  bool operator==(const PlaneCopies&) const = default;

 private:
  struct Plane {
    std::uint8_t count = 1;  // of copies
    std::uint8_t home = 0;
    std::uint8_t counts = kNone;  // named by the commit that counts
    std::uint8_t next = kNone;    // named by the commit under way
    bool operator==(const Plane&) const = default;
  };

  bool is_named(const Plane& plane, std::uint8_t copy) const {
    return plane.counts == copy || plane.next == copy;
  }

  std::vector<Plane> planes_;
  bool is_committing_ = false;
};

}  // namespace sluice
