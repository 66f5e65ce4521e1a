// The handle of an engine, with the objects that a C program cannot own: the step and the leases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/cuda_device.h>
#include <sluice/engine.h>
#include <sluice/status_publisher.h>

#include "capi/call_guard.h"

// The struct holds a lease of the application, and the stream for which the lease was acquired.
struct HeldLease {
  sluice::Lease lease;
  sluice::StreamId stream;
};

struct sluice_engine : sluice::Handle {
  static constexpr const char* kNoun = "engine";

  ~sluice_engine() {
    leases.clear();
    step.reset();
    inference.reset();
  }

  // Wraps the C callback `values` in a function of the type that the engine needs. The handle,
  // `values` and `context` must outlive the result.
  sluice::InitialValues initial_values(sluice_values values, void* context) const;
  // Adds lines for sluice_next_note(). Only the newest lines are kept.
  static constexpr std::size_t kNotesMax = 100;
  void add_notes(std::span<const std::string> added);
  void show_phase(sluice::RunPhase phase) {
    if (status) status->enter(phase);
  }
  // `sluice top` shows `phase` as the engine's phase until the result of this call is destroyed.
  [[nodiscard]] auto shown_as(sluice::RunPhase phase) {
    struct Shown {
      sluice_engine& engine;
      ~Shown() { engine.show_phase(sluice::RunPhase::kTraining); }
    };
    show_phase(phase);
    return Shown{*this};
  }
  // Returns the number of elements of `tensor`. For an opaque tensor, the result is the number of
  // bytes.
  std::uint64_t count_of(const sluice::TensorPlace& tensor) const {
    return tensor.is_opaque ? opaque_bytes[sluice::index_of(tensor.id)] : tensor.element_count;
  }

  sluice::ModelSpec model;
  sluice::Config::Precision precision;
  std::vector<std::uint64_t> opaque_bytes;  // by tensor; 0 for a tensor that is not opaque
  std::shared_ptr<void> ranks;              // of `collectives`, which use them; null for one rank
  std::unique_ptr<sluice::Device> device;
  sluice::CudaDevice* gpu = nullptr;                 // `device`, if it is a GPU
  std::unique_ptr<sluice::Collectives> collectives;  // null for one rank
  std::unique_ptr<sluice::Engine> engine;
  sluice::Stream stream;                    // for leases that the caller waits for
  std::map<void*, sluice::Stream> streams;  // the application's streams on the GPU, by handle
  std::optional<sluice::Event> handover;    // between two of these streams; made when needed
  std::optional<sluice::Step> step;
  std::optional<sluice::Inference> inference;
  std::map<std::uint64_t, HeldLease> leases;
  std::uint64_t next_lease_id = 1;
  std::optional<sluice::StatusPublisher> status;  // set if `sluice top` shows the engine
  sluice::StepFigures figures;                    // of the next step, for `status`
  std::deque<std::string> notes;
  std::uint64_t dropped_notes = 0;              // not yet told of
  std::string note;                             // the last note returned
  std::string application;                      // text of the checkpoint or commit that was opened
  std::optional<std::string> next_application;  // text for the next commits
  std::string saved_path;                       // the last saved checkpoint
};

namespace sluice {

// The device of a new engine, and the collectives of the engine's rank. With only one rank, the
// collectives are null.
struct EngineDevice {
  std::unique_ptr<Device> device;
  CudaDevice* gpu = nullptr;    // `device`, if it is a GPU
  std::shared_ptr<void> ranks;  // of `collectives`, which use them
  std::unique_ptr<Collectives> collectives;
};
using MakeDevice = std::function<EngineDevice(const Config& config)>;

// Makes a handle and its engine. `make_device` makes the device of the engine.
std::unique_ptr<sluice_engine> make_engine(const char* config_json, const sluice_model& model,
                                           const MakeDevice& make_device);

// Acquires `unit` for work on `stream`, and keeps the lease in `engine`. `call` is the name that
// messages give to the call, and `pass` is a sluice_pass.
sluice_lease acquire_for(const char* call, sluice_engine& engine, std::uint32_t unit,
                         std::int32_t pass, const Stream& stream);
// Runs `acquire`. Returns SLUICE_PENDING if `acquire` waits for more than `milliseconds`.
sluice_status within(sluice_engine* engine, const char* call, std::uint32_t milliseconds,
                     const std::function<void(const char* name)>& acquire);

}  // namespace sluice
