#include "engine/step/step_failure.h"

#include <fmt/format.h>

namespace sluice {

void StepFailure::throw_if_unusable() {
  if (poison_) throw *poison_;
  try {
    scheduler_.throw_if_failed();
  } catch (const Error& error) {
    give_up();
    throw_cause(error);
    throw;
  }
}

void StepFailure::await(const std::function<bool()>& ready) {
  try {
    scheduler_.await(ready);
  } catch (const Error& error) {
    give_up();
    throw_cause(error);
    throw;
  }
}

// A device that has failed skips copies, so updates compute with numbers that are not the model's,
// and its rank leaves the others.
void StepFailure::throw_cause(const Error& error) {
  if (error.code() == ErrorCode::kNonFinite || error.code() == ErrorCode::kRanks)
    throw_if_device_failed();
}

void StepFailure::throw_if_device_failed() {
  try {
    device_.synchronize(probe_.id());
  } catch (...) {
    is_device_heard_ = true;
    give_up();
    throw;
  }
}

std::optional<std::string> StepFailure::unheard(bool has_copies) {
  try {
    if (scheduler_.failed() && !scheduler_.is_heard()) throw_if_unusable();
    if (has_copies && !is_device_heard_) throw_if_device_failed();
  } catch (const std::exception& error) {
    return error.what();
  }
  return std::nullopt;
}

// After a failure in the middle of an update, later calls report that.
void StepFailure::give_up() {
  if (poison_) return;
  bool is_partial = false;
  std::uint64_t version = 0;
  scheduler_.run([&] {
    is_partial = pass_.is_partial();
    version = pass_.version();
  });
  if (!is_partial) return;
  try {
    device_.synchronize(probe_.id());  // first: it may be the cause of the other
    scheduler_.throw_if_failed();
  } catch (const std::exception& error) {
    poison_ =
        Error(ErrorCode::kPoisoned,
              fmt::format("the update of step {} failed midway, so the state is neither that of "
                          "step {} nor of step {}; {}: {}",
                          version + 1, version, version + 1, way_back(), error.what()));
  }
}

void StepFailure::abandoned_midway(std::uint64_t version) {
  if (poison_) return;
  poison_ =
      Error(ErrorCode::kPoisoned,
            fmt::format("step {} was abandoned after blocks had been updated "
                        "(optimizer.overlap \"eager\", and \"auto\" where nothing is clipped; "
                        "\"deferred\" waits for finish), so the state is neither that of "
                        "step {} nor of step {}; {}",
                        version + 1, version, version + 1, way_back()));
}

std::string StepFailure::way_back() const {
  std::string way = "start again from the last saved model";
  if (commits_ != nullptr) scheduler_.run([&] { way = commits_->way_back(); });
  return way;
}

void StepFailure::abandoned_alone(std::uint64_t version, std::uint32_t rank,
                                  std::uint32_t rank_count) {
  if (poison_) return;
  poison_ =
      Error(ErrorCode::kPoisoned,
            fmt::format("step {} was abandoned on rank {} of {}, which is out of step with the "
                        "others now; end all ranks and start again",
                        version + 1, rank, rank_count));
}

}  // namespace sluice
