// Mistakes beside the calls of an engine: models, configs, files, devices, activations, collectives
// and detached optimizers.
#include <filesystem>
#include <limits>
#include <utility>

#include <sluice/checkpoint.h>
#include <sluice/detached_optimizer.h>
#include <sluice/plan.h>
#include <sluice/safetensors.h>
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/local_collectives.h"
#include "tests/engine/misuse/misuse_world.h"

namespace sluice::test {
namespace {

// Makes an engine after one change of model or config.
std::function<void(World&)> engine_of(const std::function<void(World&)>& change) {
  return [change](World& w) {
    const Config config = w.config;
    const ModelSpec model = w.model;
    change(w);
    const Config wrong_config = std::exchange(w.config, config);
    const ModelSpec wrong_model = std::exchange(w.model, model);
    const Engine engine(wrong_config, wrong_model, *w.device);
  };
}

const Misuse kDescriptions[] = {
    {"AModelWithoutUnits", ErrorCode::kInvalidArgument, {"no units"}, engine_of([](World& w) {
       w.model.units.clear();
     })},
    {"AUnitWithoutTensors",
     ErrorCode::kInvalidArgument,
     {"\"h.0\"", "no tensors"},
     engine_of([](World& w) { w.model.units[1].tensors.clear(); })},
    {"TwoTensorsOfOneName",
     ErrorCode::kInvalidArgument,
     {"\"wte\"", "twice"},
     engine_of([](World& w) { w.model.units[0].tensors[1].name = "wte"; })},
    {"ATensorWithoutExtents",
     ErrorCode::kInvalidArgument,
     {"\"wte\"", "no extents", "shape [1]"},
     engine_of([](World& w) { w.model.units[0].tensors[0].shape = {}; })},
    {"AnOrderOfAnUnknownUnit",
     ErrorCode::kInvalidArgument,
     {"forward_order", "77"},
     engine_of([](World& w) { w.model.forward_order[2] = UnitId{77}; })},
    {"ATrainedUnitThatBackwardLeavesOut",
     ErrorCode::kInvalidArgument,
     {"backward_order", "\"h.3\""},
     engine_of([](World& w) {
       w.model.backward_order = {UnitId{0}, UnitId{5}, UnitId{3}, UnitId{1}};
     })},
    {"NothingToTrain", ErrorCode::kInvalidArgument, {"frozen"}, engine_of([](World& w) {
       for (UnitSpec& unit : w.model.units) unit.is_frozen = true;
     })},
    {"ANumberOfTheConfigThatCannotBe",
     ErrorCode::kConfig,
     {"optimizer.adam.beta1", "1"},
     engine_of([](World& w) { w.config.optimizer.adam.beta1 = 1; })},
    {"APathThatIsNotThere",
     ErrorCode::kInput,
     {"/no/such/folder", "create it"},
     engine_of([](World& w) { w.config.storage.paths = {"/no/such/folder"}; })},
    {"ABudgetThatIsTooSmall",
     ErrorCode::kOutOfMemory,
     {"memory.host", "the smallest that works"},
     engine_of([](World& w) { w.config.memory.host_bytes = 20_KiB; })},
    {"APlanOfNoModel",
     ErrorCode::kInvalidArgument,
     {"no units"},
     [](World& w) { (void)plan(w.config, ModelSpec(), this_machine(w.config)); }},
};
SLUICE_MISUSES(Descriptions, kDescriptions);

const Misuse kDevices[] = {
    {"AStreamThatWasDestroyed",
     ErrorCode::kInvalidArgument,
     {"stream", "\"host\"", "destroyed", "give one"},
     [](World& w) {
       const StreamId gone = Stream(*w.device, "other").id();
       w.device->launch(gone, [] {});
     }},
    {"AnEventOfAnotherDevice",
     ErrorCode::kInvalidArgument,
     {"event", "\"host\"", "another device", "give one"},
     [](World& w) {
       const auto other = make_host_device({.memory_bytes = 1_MiB});
       std::vector<Event> events;
       for (int i = 0; i < 10'000; ++i) events.emplace_back(*other);
       w.device->record(events.back().id(), w.stream.id());
     }},
    {"AnEmptyStream",
     ErrorCode::kInvalidArgument,
     {"stream 0", "\"host\"", "empty", "give one"},
     [](World& w) { w.device->synchronize(Stream().id()); }},
    {"WorkWithoutAFunction",
     ErrorCode::kInvalidArgument,
     {"launch", "empty function"},
     [](World& w) { w.device->launch(w.stream.id(), {}); }},
    {"ACopyFromNowhere",
     ErrorCode::kInvalidArgument,
     {"copy", "null"},
     [](World& w) {
       const DeviceBuffer buffer(*w.device, 4096, "test");
       w.device->copy(buffer.data(), nullptr, 4096, w.stream.id());
     }},
    {"ACopyOntoItself",
     ErrorCode::kInvalidArgument,
     {"copy", "overlap", "4096 bytes", "third buffer"},
     [](World& w) {
       const DeviceBuffer buffer(*w.device, 8192, "test");
       w.device->copy(buffer.data() + 1, buffer.data(), 4096, w.stream.id());
     }},
    {"MoreMemoryThanTheDeviceHas",
     ErrorCode::kOutOfMemory,
     {"test", "64.0 MiB", "keep less"},
     [](World& w) { const DeviceBuffer buffer(*w.device, 65_MiB, "test"); }},
};
SLUICE_MISUSES(Devices, kDevices);

const Misuse kRanks[] = {
    {"CollectivesOfAnotherDevice",
     ErrorCode::kInvalidArgument,
     {"\"local\"", "rank 1 of 2", "another device", "join with"},
     [](World& w) {
       const auto device = make_host_device({.memory_bytes = 64_MiB});
       LocalWorld world(2, {.timeout_s = 5, .sum = sum_in_order});
       const auto collectives = world.join(1, *device);
       const Engine engine(w.config, w.model, *w.device, collectives.get());
     }},
};
SLUICE_MISUSES(OfRanks, kRanks);

void keep_activations(World& w) {
  w.model.units.pop_back();  // no unit is used twice
  w.model.forward_order = {UnitId{0}, UnitId{1}, UnitId{2}, UnitId{3}, UnitId{4}};
  w.model.boundary_bytes = {4096, 4096, 4096, 4096};
  w.config.activations.home = ActivationHome::kHost;
}

// Rows whose steps the engine follows with its own activations, so the world does not train.
const Misuse kActivations[] = {
    {"AnActivationOutOfOrder",
     ErrorCode::kInvalidArgument,
     {"save", "activation 3", "is next"},
     [](World& w) {
       Step step = w.begin();
       (void)w.forward(step);
       (void)step.save({.boundary = 3}, w.stream);
     },
     keep_activations,
     true},
    {"AnActivationThatWasReleased",
     ErrorCode::kInvalidArgument,
     {"data", "released", "load"},
     [](World& w) {
       Step step = w.begin();
       (void)w.forward(step);
       ActivationLease lease = step.save({.boundary = 0}, w.stream);
       lease.release();
       (void)lease.data();
     },
     keep_activations,
     true},
    {"AnActivationKeptPastItsStep",
     ErrorCode::kInvalidArgument,
     {"data", "step", "again"},
     [](World& w) {
       std::optional<Step> step(w.begin());
       (void)w.forward(*step);
       const ActivationLease lease = step->save({.boundary = 0}, w.stream);
       step.reset();
       (void)lease.data();
     },
     keep_activations,
     true},
    {"AnActivationKeptPastItsEngine",
     ErrorCode::kInvalidArgument,
     {"data", "engine", "again"},
     [](World& w) {
       std::optional<Step> step(w.begin());
       (void)w.forward(*step);
       const ActivationLease lease = step->save({.boundary = 0}, w.stream);
       w.engine.reset();
       (void)lease.data();
     },
     keep_activations},
    {"AnActivationOnAnotherDevice",
     ErrorCode::kInvalidArgument,
     {"save", "another device", "give a Stream"},
     [](World& w) {
       const auto device = make_host_device({.memory_bytes = 1_MiB});
       const Stream stream(*device, "other");
       Step step = w.begin();
       (void)w.forward(step);
       (void)step.save({.boundary = 0}, stream);
     },
     keep_activations,
     true},
};
SLUICE_MISUSES(Activations, kActivations);

void write_tensor(const std::string& path) {
  const SafetensorsTensor tensor{.name = "w", .dtype = "F32", .shape = {8}};
  write_safetensors_file(path, {&tensor, 1}, {},
                         [](std::size_t, std::uint64_t, std::span<std::byte> bytes) {
                           std::ranges::fill(bytes, std::byte{0});
                         });
}

const Misuse kFiles[] = {
    {"ACheckpointThatIsNotThere",
     ErrorCode::kInput,
     {"/none", "latest"},
     [](World& w) { (void)open_checkpoint(w.directory.file("none")); }},
    {"ACheckpointOfAnotherModel",
     ErrorCode::kInput,
     {"model.scale.shape", "name a checkpoint of this model"},
     [](World& w) {
       const SavedCheckpoint saved = w.engine->save(w.directory.file("saved"), {});
       ModelSpec other = w.model;
       other.units.back().tensors[0].shape = {2};
       Engine engine(w.config, other, *w.device);
       engine.restore(*open_checkpoint(saved.path).source);
     }},
    {"ACheckpointIntoAFile",
     ErrorCode::kInput,
     {"/w.safetensors", "check the folder"},
     [](World& w) {
       write_tensor(w.directory.file("w.safetensors"));
       (void)w.engine->save(w.directory.file("w.safetensors"), {});
     }},
    {"ATensorThatTheFileLacks",
     ErrorCode::kInput,
     {"\"v\"", "/w.safetensors"},
     [](World& w) {
       write_tensor(w.directory.file("w.safetensors"));
       std::vector<float> values(1);
       SafetensorsReader(w.directory.file("w.safetensors")).read("v", 0, values);
     }},
    {"ElementsThatTheFileLacks",
     ErrorCode::kInput,
     {"\"w\"", "8"},
     [](World& w) {
       write_tensor(w.directory.file("w.safetensors"));
       std::vector<float> values(2);
       SafetensorsReader(w.directory.file("w.safetensors")).read("w", 7, values);
     }},
    {"ATypeThatTheFormatDoesNotWrite",
     ErrorCode::kInvalidArgument,
     {"\"w\"", "\"I64\"", "expected F32"},
     [](World& w) {
       const SafetensorsTensor tensor{.name = "w", .dtype = "I64", .shape = {8}};
       write_safetensors_file(w.directory.file("x"), {&tensor, 1}, {}, {});
     }},
};
SLUICE_MISUSES(Files, kFiles);

DetachedOptimizer detached(World& w) {
  return DetachedOptimizer(w.config, {{.name = "w", .element_count = 100}});
}

const Misuse kDetached[] = {
    {"ADetachedTensorThatDoesNotExist",
     ErrorCode::kInvalidArgument,
     {"wait", "tensor 3", "there are 1"},
     [](World& w) { detached(w).wait(3); }},
    {"AnUpdateWithoutAGradient",
     ErrorCode::kInvalidArgument,
     {"begin", "\"w\"", "gradient"},
     [](World& w) {
       std::vector<float> values(100);
       const DetachedUpdate update{.parameter = values.data(), .learning_rate = 1, .adam = {}};
       detached(w).begin({&update, 1});
     }},
    {"AnUpdateOfStepZero",
     ErrorCode::kInvalidArgument,
     {"begin", "\"w\"", "step"},
     [](World& w) {
       std::vector<float> values(100);
       const DetachedUpdate update{.parameter = values.data(),
                                   .gradient = values.data(),
                                   .step = 0,
                                   .learning_rate = 1,
                                   .adam = {}};
       detached(w).begin({&update, 1});
     }},
    {"ADetachedReadPastTheEnd",
     ErrorCode::kInvalidArgument,
     {"read", "[99, +2)", "\"w\"", "100"},
     [](World& w) {
       std::vector<float> values(2);
       detached(w).read(0, StateKind::kExpAvg, 99, values);
     }},
    {"AMasterThatIsTheParameter",
     ErrorCode::kInvalidArgument,
     {"read", "\"w\"", "fp32"},
     [](World& w) {
       std::vector<float> values(2);
       detached(w).read(0, StateKind::kMaster, 0, values);
     }},
    {"ADetachedOptimizerOfNothing",
     ErrorCode::kInvalidArgument,
     {"no tensors"},
     [](World& w) { const DetachedOptimizer optimizer(w.config, {}); }},
};
SLUICE_MISUSES(Detached, kDetached);

}  // namespace
}  // namespace sluice::test
