// The engine behind the C interface, with what C cannot own: the step and the leases under way.
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

  sluice::ModelSpec model;
  sluice::Config::Precision precision;
  std::unique_ptr<sluice::HostDevice> device;
  std::unique_ptr<sluice::Engine> engine;
  sluice::Stream stream;
  std::optional<sluice::Step> step;
  std::optional<sluice::Inference> inference;
  std::map<std::uint64_t, sluice::Lease> leases;
  std::uint64_t next_lease_id = 1;
  std::deque<std::string> notes;
  std::string note;         // the last one handed out
  std::string application;  // of the checkpoint that was restored
  std::string saved_path;   // of the one that was saved last
};
