// The engine behind the C interface, with the objects that C cannot own: the step and the leases.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <sluice/engine.h>
#include <sluice/host_device.h>

#include "capi/call_guard.h"

struct sluice_engine : sluice::Handle {
  ~sluice_engine() {
    leases.clear();
    step.reset();
    inference.reset();
  }

  // Wraps a C callback in the function that the engine needs. `values` and `context` must outlive
  // the result.
  static sluice::InitialValues initial_values(sluice_values values, void* context) {
    return [values, context](const sluice::TensorPlace& tensor, std::uint64_t first,
                             std::span<float> target) {
      const int returned =
          values(context, sluice::index_of(tensor.id), first, target.data(), target.size());
      if (returned != 0) throw sluice::CallbackFailed{};
    };
  }

  sluice::ModelSpec model;
  sluice::Config::Precision precision;
  std::unique_ptr<sluice::HostDevice> device;
  std::unique_ptr<sluice::Collectives> collectives;  // null for one rank
  std::unique_ptr<sluice::Engine> engine;
  sluice::Stream stream;
  std::optional<sluice::Step> step;
  std::optional<sluice::Inference> inference;
  std::map<std::uint64_t, sluice::Lease> leases;
  std::uint64_t next_lease_id = 1;
  std::deque<std::string> notes;
  std::string note;                             // the last note returned
  std::string application;                      // text of the checkpoint or commit that was opened
  std::optional<std::string> next_application;  // text for the next commits
  std::string saved_path;                       // the last saved checkpoint
};
