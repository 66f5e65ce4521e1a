// This header has the components of an engine, and the code that several functions of Engine share.
// Only engine.cc, engine_parts.cc and engine_save.cc include this header.
//
// Thread rule: the application's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sluice/checkpoint.h>
#include <sluice/engine.h>
#include <sluice/error.h>
#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/durable/durable_store.h"
#include "engine/flow/activation_flow.h"
#include "engine/flow/counted_norm.h"
#include "engine/flow/lease_guard.h"
#include "engine/step/engine_link.h"
#include "engine/step/step_loop.h"
#include "engine/store/state_access.h"
#include "engine/store/storage_queue.h"
#include "engine/store/unit_versions.h"

namespace sluice {

// The ranks' collectives outlive the engine. So the destructor removes all references to the engine
// from the collectives.
struct RanksHold {
  explicit RanksHold(Ranks& held) : ranks(held) {}
  RanksHold(const RanksHold&) = delete;
  RanksHold& operator=(const RanksHold&) = delete;
  ~RanksHold() {
    ranks.on_failure({});
    ranks.forget_memory();
  }

  Ranks& ranks;
};

enum class SaveWait : std::uint8_t { kNo, kYes };

// The parts are built from top to bottom and destroyed from bottom to top. So the parts above a
// part always outlive this part.
struct Engine::Parts {
  Parts(const Config& given_config, const ModelSpec& given_model, Device& device,
        const QueueDecorator& decorate, Collectives* collectives);
  // Makes the parts. During the call, the thread has the floating-point environment of
  // base/float_environment.h.
  static std::unique_ptr<Parts> make(const Config& config, const ModelSpec& model, Device& device,
                                     const QueueDecorator& decorate, Collectives* collectives);
  ~Parts() { link->cut(); }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  // Fills `target` with elements of a tensor, beginning with element `first_element`. Ranks that
  // share the state make this call together. If one rank cannot read its part, the call fails on
  // all ranks.
  void read(TensorId id, StateKind kind, std::uint64_t first_element, std::span<std::byte> target);
  void require_idle(const char* call);
  void require_no_state(const char* call) const;
  void require_durable(const char* call) const;
  // Returns whether all ranks have the tensor.
  bool is_shared(const std::string& tensor) const;
  // Describes the state of all ranks, including the local units of each rank. All ranks make this
  // call together.
  StateDescription description_of_all();
  // Sets the initial values of the state. With a durable store, the call also makes the first
  // commit, which contains these values.
  void fill(StateSource& source, const std::string& application, const char* call);
  // Replaces the masters of `tensors` by `values`. Must be called between two steps.
  void replace_values(std::span<const TensorId> tensors, const InitialValues& values);
  // Continues a run from the last commit of a durable store.
  void open_store();
  void commit_first();
  void lend_state();

  std::vector<std::string> notes;
  Config config;
  ModelSpec model;
  Ranks ranks;
  Layout layout;
  Placement placement;
  std::optional<DurableStore> durable;  // empty if the state is scratch
  Tiers tiers;
  std::unique_ptr<LeaseGuard> guard;  // null without memory.guard
  Scheduler scheduler;
  std::unique_ptr<IoQueue> queue;
  BlockStore store;
  Worker worker;
  CountedTensors counted;
  UnitVersions versions{layout};
  FlowParts flow;
  StepLoop loop;
  ActivationFlow activations;
  StateAccess state;
  std::shared_ptr<EngineLink> link = std::make_shared<EngineLink>();
  // A checkpoint that is being written while training goes on.
  struct Save {
    std::unique_ptr<CheckpointWriter> writer;
    std::uint64_t step = 0;
    std::uint64_t begin_ns = 0;
    std::int64_t blocked_ns = 0;
  };
  // If all ranks have written their parts, the call gives the checkpoint its final name. With
  // SaveWait::kYes, the call first waits until all ranks have written their parts.
  void advance_save(SaveWait wait);
  // Throws the failure of the last checkpoint, unless a call has thrown this failure already.
  void throw_save_failure();
  SaveOptions save_options(SaveOptions options) const;

  std::optional<Save> save;
  std::optional<SavedCheckpoint> saved;
  std::optional<Error> save_failure;
  bool is_initialized = false;
  bool is_closed = false;
  std::function<void(const std::string&)> last_words;
  RanksHold ranks_hold{ranks};  // last member: released first, even if the constructor throws
};

}  // namespace sluice
