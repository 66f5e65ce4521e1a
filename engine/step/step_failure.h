// The failures that stop an engine. Two failures stop an engine: the scheduler's latched failure
// and the device's failure. If a failure or an abandoned step interrupts an update, the state is
// between two steps. The engine then also keeps a permanent error.
//
// Thread rule: the application's thread.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include <sluice/error.h>
#include "engine/flow/optimizer_pass.h"

namespace sluice {

class StepFailure {
 public:
  // All arguments must outlive the object. `commits` may be null.
  StepFailure(const OptimizerPass& pass, const Commits* commits, Device& device,
              Scheduler& scheduler)
      : pass_(pass), commits_(commits), device_(device), scheduler_(scheduler), probe_(device) {}

  // Throws the failure that stops the engine, if there is one.
  void throw_if_unusable();
  // Waits until `ready` returns true on the scheduler's thread. Throws the same failures as
  // throw_if_unusable().
  void await(const std::function<bool()>& ready);
  // Throws the failure of computation or copies. Requires: all computation and copies have
  // completed.
  void throw_if_device_failed();
  // Returns a failure that occurred after the application's last call. No call has reported this
  // failure yet. If `has_copies` is true, the device may also have failed after the last call.
  // Requires: nothing is in flight.
  std::optional<std::string> unheard(bool has_copies);
  // Called when a step was abandoned after some blocks had been updated. The step's update has the
  // number `version` + 1.
  void abandoned_midway(std::uint64_t version);
  // Called when one of several ranks has abandoned a step. The step's update has the number
  // `version` + 1. The rank is then no longer at the same step as the other ranks.
  void abandoned_alone(std::uint64_t version, std::uint32_t rank, std::uint32_t rank_count);

 private:
  void give_up();
  // Throws the device's failure if this failure explains `error`.
  void throw_cause(const Error& error);
  std::string way_back() const;

  const OptimizerPass& pass_;
  const Commits* commits_;
  Device& device_;
  Scheduler& scheduler_;
  Event probe_;  // never recorded; a wait for it only reports the device's failure
  std::optional<Error> poison_;
  bool is_device_heard_ = false;
};

}  // namespace sluice
