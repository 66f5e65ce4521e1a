// Mistakes in the order of calls of an engine, its steps and its inferences, and in their options.
#include <cmath>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

#include <sluice/checkpoint.h>
#include "tests/engine/misuse/misuse_world.h"
#include "tests/support/memory_source.h"

namespace sluice::test {
namespace {

const Misuse kSteps[] = {
    {"FinishedTwice",
     ErrorCode::kInvalidArgument,
     {"finish", "step is over", "begin_step()"},
     [](World& w) {
       Step step = w.begin();
       w.walk(step);
       (void)step.finish();
       (void)step.finish();
     },
     {},
     true},
    {"FinishedWithALease",
     ErrorCode::kInvalidArgument,
     {"finish", "1 leases are held", "release them"},
     [](World& w) {
       Step step = w.begin();
       const Lease lease = w.backward(step, 0);
       (void)step.finish();
     }},
    {"FinishedBeforeBackward",
     ErrorCode::kInvalidArgument,
     {"finish", "backward", "expects"},
     [](World& w) {
       Step step = w.begin();
       (void)w.forward(step);
       (void)step.finish();
     }},
    {"AStepThatWasMovedFrom",
     ErrorCode::kInvalidArgument,
     {"number", "moved", "begin_step()"},
     [](World& w) {
       Step step = w.begin();
       const Step other = std::move(step);
       (void)step.number();  // NOLINT(bugprone-use-after-move)
     }},
    {"AStepKeptPastItsEngine",
     ErrorCode::kInvalidArgument,
     {"acquire", "step is over", "engine", "destroyed", "keep the engine"},
     [](World& w) {
       Step step = w.begin();
       w.engine.reset();
       (void)w.forward(step);
     }},
    {"AnInferenceKeptPastItsEngine",
     ErrorCode::kInvalidArgument,
     {"acquire", "inference is over", "destroyed", "keep the engine"},
     [](World& w) {
       Inference inference = w.engine->begin_inference();
       w.engine.reset();
       (void)inference.acquire(UnitId{0}, w.stream);
     }},
    {"AnInferenceThatWasMovedFrom",
     ErrorCode::kInvalidArgument,
     {"acquire", "moved", "begin_inference()"},
     [](World& w) {
       Inference inference = w.engine->begin_inference();
       const Inference other = std::move(inference);
       (void)inference.acquire(UnitId{0}, w.stream);  // NOLINT(bugprone-use-after-move)
     }},
    {"TwoStepsAtOnce",
     ErrorCode::kInvalidArgument,
     {"begin_step", "still active", "finish or destroy"},
     [](World& w) {
       const Step step = w.begin();
       (void)w.begin();
     }},
    {"AStepDuringAnInference",
     ErrorCode::kInvalidArgument,
     {"begin_step", "still active", "finish or destroy"},
     [](World& w) {
       const Inference inference = w.engine->begin_inference();
       (void)w.begin();
     }},
    {"APassOfInferenceInAStep",
     ErrorCode::kInvalidArgument,
     {"acquire", "\"embedding\"", "\"inference\""},
     [](World& w) {
       Step step = w.begin();
       (void)step.acquire(UnitId{0}, Pass::kInference, w.stream);
     }},
    {"ARateThatIsNotFinite",
     ErrorCode::kInvalidArgument,
     {"begin_step", "learning_rate", "nan", "finite and not negative"},
     [](World& w) { (void)w.engine->begin_step({.learning_rate = std::nan("")}); }},
    {"AStepWithoutMicroBatches",
     ErrorCode::kInvalidArgument,
     {"begin_step", "micro_batches is 0", "at least one"},
     [](World& w) { (void)w.engine->begin_step({.learning_rate = 1, .micro_batches = 0}); }},
    {"RatesOfGroupsThatAreNotThere",
     ErrorCode::kInvalidArgument,
     {"group_learning_rates has 2", "has 0"},
     [](World& w) {
       (void)w.engine->begin_step({.learning_rate = 1, .group_learning_rates = {1, 2}});
     }},
    {"ADivisorOfZero",
     ErrorCode::kInvalidArgument,
     {"finish", "gradient_divisor is 0", "finite and positive"},
     [](World& w) {
       Step step = w.begin();
       w.walk(step);
       (void)step.finish({.gradient_divisor = 0});
     }},
    {"AUseAfterItsEagerUpdate",
     ErrorCode::kInvalidArgument,
     {"acquire", "\"h.3\"", "\"eager\"", "\"deferred\""},
     [](World& w) {
       Step step = w.begin();
       w.walk(step);
       (void)step.acquire(UnitId{4}, Pass::kBackward, w.stream);
     },
     [](World& w) {
       w.config.optimizer.overlap = OverlapPolicy::kEager;
       w.config.optimizer.clip_norm = 0;
       w.config.optimizer.non_finite = NonFinitePolicy::kStop;
     },
     true},
    {"AnActivationThatTheEngineDoesNotKeep",
     ErrorCode::kInvalidArgument,
     {"save", "Config::activations"},
     [](World& w) {
       Step step = w.begin();
       (void)step.save({}, w.stream);
     }},
};
SLUICE_MISUSES(Steps, kSteps);

// Calls `body` on another thread, and throws here what it threw there.
void elsewhere(const std::function<void()>& body) {
  std::exception_ptr thrown;
  std::thread([&] {
    try {
      body();
    } catch (...) {
      thrown = std::current_exception();
    }
  }).join();
  if (thrown) std::rethrow_exception(thrown);
}

const Misuse kEngines[] = {
    {"AStepBeforeTheValues",
     ErrorCode::kInvalidArgument,
     {"begin_step", "initialize()"},
     [](World& w) {
       Engine other(w.config, w.model, *w.device);
       (void)other.begin_step({.learning_rate = 1});
     }},
    {"ValuesTwice",
     ErrorCode::kInvalidArgument,
     {"initialize", "already", "make a new engine"},
     [](World& w) { w.engine->initialize(toy_values()); }},
    {"NoFunctionOfValues",
     ErrorCode::kInvalidArgument,
     {"initialize", "empty"},
     [](World& w) { Engine(w.config, w.model, *w.device).initialize({}); }},
    {"ARestoreAfterTheValues",
     ErrorCode::kInvalidArgument,
     {"restore", "already", "make a new engine"},
     [](World& w) {
       MemorySource source(*w.engine);
       w.engine->restore(source);
     }},
    {"AReadDuringAStep",
     ErrorCode::kInvalidArgument,
     {"read_state", "active", "finish or destroy"},
     [](World& w) {
       const Step step = w.begin();
       w.read(0, StateKind::kMaster, 0, 4);
     }},
    {"ASaveDuringAStep",
     ErrorCode::kInvalidArgument,
     {"save", "active", "finish or destroy"},
     [](World& w) {
       const Step step = w.begin();
       (void)w.engine->save(w.directory.file("saved"), {});
     }},
    {"ACloseWithALease",
     ErrorCode::kInvalidArgument,
     {"close", "active", "finish or destroy"},
     [](World& w) {
       Step step = w.begin();
       const Lease lease = w.forward(step);
       w.engine->close();
     }},
    {"AStepAfterClose",
     ErrorCode::kInvalidArgument,
     {"begin_step", "closed", "make a new one"},
     [](World& w) {
       w.engine->close();
       (void)w.engine->begin_step({.learning_rate = 1});
     },
     {},
     true},
    {"ACommitWithoutAStore",
     ErrorCode::kInvalidArgument,
     {"commit_now", "storage.state.name"},
     [](World& w) { w.engine->commit_now(); }},
    {"TwoEnginesOnOneStore",
     ErrorCode::kInput,
     {"\"run\"", "in use", "wait for it to end"},
     [](World& w) { const Engine other(w.config, w.model, *w.device); },
     [](World& w) { w.config.storage.state.name = "run"; }},
    {"ValuesForAStoreThatHasThem",
     ErrorCode::kInvalidArgument,
     {"initialize", "\"run\"", "step 0", "open_or_create"},
     [](World& w) {
       w.engine.reset();
       Engine(w.config, w.model, *w.device).initialize(toy_values());
     },
     [](World& w) { w.config.storage.state.name = "run"; }},
    {"ACallDuringAnothersCall",
     ErrorCode::kInvalidArgument,
     {"drain", "inside initialize", "another thread", "let that call return"},
     [](World& w) {
       Engine other(w.config, w.model, *w.device);
       std::exception_ptr thrown;
       other.initialize(
           [&](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
             toy_values()(tensor, first, values);
             try {
               if (!thrown) elsewhere([&] { other.drain(); });
             } catch (...) {
               thrown = std::current_exception();
             }
           });
       if (thrown) std::rethrow_exception(thrown);
     }},
    {"ACallFromAFunctionThatTheEngineCalls",
     ErrorCode::kInvalidArgument,
     {"read_state", "inside initialize", "let that call return"},
     [](World& w) {
       Engine other(w.config, w.model, *w.device);
       other.initialize(
           [&](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
             other.read_state(tensor.id, StateKind::kMaster, first, std::as_writable_bytes(values));
           });
     }},
};
SLUICE_MISUSES(Engines, kEngines);

}  // namespace
}  // namespace sluice::test
