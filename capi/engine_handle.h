// The engine behind the C interface, with the objects that C cannot own: the step and the leases.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/status_publisher.h>

#include "capi/call_guard.h"

struct sluice_engine : sluice::Handle {
  ~sluice_engine() {
    leases.clear();
    step.reset();
    inference.reset();
  }

  // Wraps a C callback in the function that the engine needs. The handle, `values` and `context`
  // must outlive the result.
  sluice::InitialValues initial_values(sluice_values values, void* context) const;
  // Keeps the newest hundred lines for sluice_next_note().
  void add_notes(std::span<const std::string> added);
  void show_phase(sluice::RunPhase phase) {
    if (status) status->enter(phase);
  }
  // The engine is shown as being in `phase` until the result is destroyed.
  [[nodiscard]] auto shown_as(sluice::RunPhase phase) {
    struct Shown {
      sluice_engine& engine;
      ~Shown() { engine.show_phase(sluice::RunPhase::kTraining); }
    };
    show_phase(phase);
    return Shown{*this};
  }
  // The number of a tensor's elements, or of its bytes if the tensor is opaque.
  std::uint64_t count_of(const sluice::TensorPlace& tensor) const {
    return tensor.is_opaque ? opaque_bytes[sluice::index_of(tensor.id)] : tensor.element_count;
  }

  sluice::ModelSpec model;
  sluice::Config::Precision precision;
  std::vector<std::uint64_t> opaque_bytes;  // by tensor; 0 if it is not opaque
  std::unique_ptr<sluice::HostDevice> device;
  std::unique_ptr<sluice::Collectives> collectives;  // null for one rank
  std::unique_ptr<sluice::Engine> engine;
  sluice::Stream stream;
  std::optional<sluice::Step> step;
  std::optional<sluice::Inference> inference;
  std::map<std::uint64_t, sluice::Lease> leases;
  std::uint64_t next_lease_id = 1;
  std::optional<sluice::StatusPublisher> status;  // if the engine is shown
  sluice::StepFigures figures;                    // of the next step, for `status`
  std::deque<std::string> notes;
  std::string note;                             // the last note returned
  std::string application;                      // text of the checkpoint or commit that was opened
  std::optional<std::string> next_application;  // text for the next commits
  std::string saved_path;                       // the last saved checkpoint
};
