// For each plane: the copy that is home, the copies that commits name, and the one that a store may
// go to. This rule makes the working files a checkpoint: data that a commit names is never
// overwritten, until a later commit has replaced that commit on every rank.
//
// Thread rule: none of its own; the scheduler's thread in an engine.
// Invariants: a named copy keeps the content that it had when it was named, and so does the home;
// at most two commits are held, the valid one and the one under way.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace sluice {

class PlaneCopies {
 public:
  static constexpr std::uint8_t kNone = 0xff;

  // `copy_count`: for every plane; 1 for planes that are never stored again.
  PlaneCopies(std::uint32_t plane_count, std::uint8_t copy_count);
  // The same, with a count for each plane.
  explicit PlaneCopies(std::span<const std::uint8_t> copy_counts);

  std::uint32_t plane_count() const { return static_cast<std::uint32_t>(planes_.size()); }
  std::uint8_t home(std::uint32_t plane) const { return planes_[plane].home; }
  // The copy that the commit under way names, or else the valid one: for the record's table.
  std::uint8_t named_by_next(std::uint32_t plane) const { return planes_[plane].next; }
  std::uint8_t named(std::uint32_t plane) const { return planes_[plane].counts; }

  // The copy that a store may go to: one that is neither home nor named. Failing that, with
  // `in_place`, the home itself if no commit names it; no read of it may then be under way. Empty:
  // the store has to wait for a commit.
  enum class InPlace : std::uint8_t { kNo, kYes };
  std::optional<std::uint8_t> target(std::uint32_t plane, InPlace in_place) const;
  // A store to `copy` has ended, and makes it home.
  // Requires: `copy` came from target().
  void stored(std::uint32_t plane, std::uint8_t copy);

  // A commit begins: it names every home.
  // Requires: none is under way.
  void begin_commit();
  bool is_committing() const { return is_committing_; }
  // The commit is valid on every rank: copies that only the one before names become free. Requires:
  // a commit is under way.
  void end_commit();

  // At opening: the valid record names `copy`.
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
