#include "engine/store/plane_copies.h"

#include <sluice/error.h>
#include "engine/store/commit_format.h"

namespace sluice {

PlaneCopies::PlaneCopies(std::uint32_t plane_count, std::uint8_t copy_count)
    : PlaneCopies(std::vector<std::uint8_t>(plane_count, copy_count)) {}

PlaneCopies::PlaneCopies(std::span<const std::uint8_t> copy_counts) {
  for (const std::uint8_t count : copy_counts) {
    SLUICE_CHECK(count >= 1 && count <= kCopiesMax, "a plane has one to three copies");
    planes_.push_back({.count = count});
  }
}

std::optional<std::uint8_t> PlaneCopies::target(std::uint32_t plane, InPlace in_place) const {
  const Plane& of = planes_[plane];
  for (std::uint8_t copy = 0; copy < of.count; ++copy)
    if (copy != of.home && !is_named(of, copy)) return copy;
  if (in_place == InPlace::kYes && !is_named(of, of.home)) return of.home;
  return std::nullopt;
}

void PlaneCopies::stored(std::uint32_t plane, std::uint8_t copy) {
  Plane& of = planes_[plane];
  SLUICE_CHECK(copy < of.count && !is_named(of, copy), "a store goes to a copy without a name");
  of.home = copy;
}

void PlaneCopies::begin_commit() {
  SLUICE_CHECK(!is_committing_, "one commit is under way at a time");
  is_committing_ = true;
  for (Plane& plane : planes_) plane.next = plane.home;
}

void PlaneCopies::end_commit() {
  SLUICE_CHECK(is_committing_, "a commit is under way");
  is_committing_ = false;
  for (Plane& plane : planes_) {
    plane.counts = plane.next;
    plane.next = kNone;
  }
}

void PlaneCopies::restore(std::uint32_t plane, std::uint8_t copy) {
  Plane& of = planes_[plane];
  SLUICE_CHECK(copy < of.count, "the record names an existing copy");
  of = {.count = of.count, .home = copy, .counts = copy};
}

}  // namespace sluice
