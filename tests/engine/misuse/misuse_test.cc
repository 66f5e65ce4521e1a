// Mistakes in ids, ranges and leases.
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "tests/engine/misuse/misuse_world.h"

namespace sluice::test {
namespace {

StateBytes trained(const std::function<void(MisuseWorld&)>& prepare) {
  MisuseWorld world;
  if (prepare) prepare(world);
  world.open();
  return world.train();
}

}  // namespace

TEST_P(MisuseTest, EndsInAnErrorAndHarmsNothing) {
  MisuseWorld world;
  if (GetParam().prepare) GetParam().prepare(world);
  world.open();
  const std::string message = expect_error(GetParam().code, [&] { GetParam().call(world); });
  for (const std::string& word : GetParam().words)
    EXPECT_NE(message.find(word), std::string::npos) << '"' << word << "\" is not in: " << message;
  if (world.engine == nullptr || GetParam().ends_engine) return;
  const StateBytes expected = trained(GetParam().prepare);
  EXPECT_TRUE(world.train() == expected);
}

namespace {

constexpr std::uint64_t kElements = 97 * 130;  // of tensor 0, "wte"

const Misuse kIds[] = {
    {"AUnitBeyondTheModel",
     ErrorCode::kInvalidArgument,
     {"acquire", "unit 99", "the model has 6"},
     [](World& w) {
       Step step = w.begin();
       (void)w.forward(step, 99);
     }},
    {"ATensorBeyondTheModel",
     ErrorCode::kInvalidArgument,
     {"read_state", "tensor 17", "the model has 15"},
     [](World& w) { w.read(17, StateKind::kMaster, 0, 4); }},
    {"ATensorBeyondTheUnit",
     ErrorCode::kInvalidArgument,
     {"parameter", "tensor 2", "\"embedding\"", "has 2"},
     [](World& w) {
       Step step = w.begin();
       (void)w.forward(step).parameter(2);
     }},
    {"AGradientBeyondTheUnit",
     ErrorCode::kInvalidArgument,
     {"gradient", "tensor 3", "\"h.3\"", "has 3"},
     [](World& w) {
       Step step = w.begin();
       (void)w.backward(step, 4).gradient(3);
     }},
    {"AUnitByAnUnknownName",
     ErrorCode::kInvalidArgument,
     {"unit", "6 units", "\"head\""},
     [](World& w) { (void)w.engine->unit("head"); }},
    {"ATensorByAnUnknownName",
     ErrorCode::kInvalidArgument,
     {"tensor", "15 tensors", "\"head\""},
     [](World& w) { (void)w.engine->tensor("head"); }},
    {"ATensorOfAnotherUnitByName",
     ErrorCode::kInvalidArgument,
     {"\"embedding\"", "\"h.0.fc\"", "wte, wpe"},
     [](World& w) {
       Step step = w.begin();
       (void)w.forward(step).tensor("h.0.fc");
     }},
    {"AStateOfNoKind",
     ErrorCode::kInvalidArgument,
     {"StateKind", "9"},
     [](World& w) { w.read(0, StateKind{9}, 0, 4); }},
    {"AReadPastTheEnd",
     ErrorCode::kInvalidArgument,
     {"\"wte\"", "12609", "12610"},
     [](World& w) { w.read(0, StateKind::kMaster, kElements - 1, 8); }},
    {"AReadWhoseEndOverflows",
     ErrorCode::kInvalidArgument,
     {"\"wte\"", "18446744073709551615", "12610"},
     [](World& w) { w.read(0, StateKind::kMaster, ~std::uint64_t{0}, 8); }},
    {"AReadOfPartOfAnElement",
     ErrorCode::kInvalidArgument,
     {"\"wte\"", "7 B", "4 B"},
     [](World& w) { w.read(0, StateKind::kMaster, 0, 7); }},
    {"AMomentOfAFrozenTensor",
     ErrorCode::kInvalidArgument,
     {"\"h.1.fc\"", "frozen"},
     [](World& w) { w.read(6, StateKind::kExpAvg, 0, 4); }},
};
SLUICE_MISUSES(Ids, kIds);

const Misuse kLeases[] = {
    {"AnotherElementType",
     ErrorCode::kInvalidArgument,
     {"parameter", "fp32", "precision.parameters is bf16", "ask for those"},
     [](World& w) {
       Step step = w.begin();
       (void)w.forward(step).parameter<float>(0);
     }},
    {"AnotherTypeOfGradient",
     ErrorCode::kInvalidArgument,
     {"gradient", "fp16", "precision.gradients is bf16", "ask for those"},
     [](World& w) {
       Step step = w.begin();
       (void)w.backward(step, 4).gradient<Fp16>(0);
     }},
    {"AGradientInForward",
     ErrorCode::kInvalidArgument,
     {"gradient", "\"embedding\"", "Pass::kBackward"},
     [](World& w) {
       Step step = w.begin();
       (void)w.forward(step).gradient(0);
     }},
    {"AGradientOfAFrozenUnit",
     ErrorCode::kInvalidArgument,
     {"gradient", "\"h.1\"", "frozen", "leave its gradients out"},
     [](World& w) {
       Step step = w.begin();
       (void)w.backward(step, 2).gradient(0);
     }},
    {"ALeaseThatWasReleased",
     ErrorCode::kInvalidArgument,
     {"parameter", "\"embedding\"", "released", "again"},
     [](World& w) {
       Step step = w.begin();
       Lease lease = w.forward(step);
       lease.release();
       (void)lease.parameter(0);
     }},
    {"ALeaseThatWasMovedFrom",
     ErrorCode::kInvalidArgument,
     {"gradient", "moved", "acquire again"},
     [](World& w) {
       Step step = w.begin();
       Lease lease = w.forward(step);
       const Lease other = std::move(lease);
       (void)lease.gradient(0);  // NOLINT(bugprone-use-after-move)
     }},
    {"ALeaseThatIsOverwrittenByItself",
     ErrorCode::kInvalidArgument,
     {"parameter", "\"embedding\"", "released", "again"},
     [](World& w) {
       Step step = w.begin();
       Lease lease = w.forward(step);
       Lease& same = lease;
       lease = std::move(same);
       lease.release();
       (void)lease.parameter(0);
     }},
    {"ALeaseKeptPastItsStep",
     ErrorCode::kInvalidArgument,
     {"parameter", "\"embedding\"", "step", "next step"},
     [](World& w) {
       std::optional<Step> step(w.begin());
       const Lease lease = w.forward(*step);
       step.reset();
       (void)lease.parameter(0);
     }},
    {"ALeaseKeptIntoTheNextStep",
     ErrorCode::kInvalidArgument,
     {"gradient", "\"embedding\"", "step", "again"},
     [](World& w) {
       std::optional<Step> step(w.begin());
       const Lease lease = w.forward(*step);
       step.reset();
       const Step next = w.begin();
       (void)lease.gradient(0);
     }},
    {"ALeaseKeptPastItsEngine",
     ErrorCode::kInvalidArgument,
     {"tensor", "unit 0", "engine", "destroyed", "keep the engine"},
     [](World& w) {
       std::optional<Step> step(w.begin());
       const Lease lease = w.forward(*step);
       w.engine.reset();
       (void)lease.tensor("wte");
     }},
    {"ALeaseKeptPastItsInference",
     ErrorCode::kInvalidArgument,
     {"parameter", "\"embedding\"", "again"},
     [](World& w) {
       std::optional<Inference> inference(w.engine->begin_inference());
       const Lease lease = inference->acquire(UnitId{0}, w.stream);
       inference.reset();
       (void)lease.parameter<Bf16>(0);
     }},
    {"ALeaseKeptPastItsStream",
     ErrorCode::kInvalidArgument,
     {"acquire", "stream", "is empty", "give a Stream"},
     [](World& w) {
       Step step = w.begin();
       std::optional<Stream> other(std::in_place, *w.device, "other");
       std::optional<Lease> lease(step.acquire(UnitId{0}, Pass::kForward, *other));
       other.reset();
       lease.reset();
       (void)step.acquire(UnitId{1}, Pass::kForward, Stream());
     }},
    {"MoreLeasesThanDeclared",
     ErrorCode::kInvalidArgument,
     {"acquire", "still held", "concurrent_leases is 1", "has to end"},
     [](World& w) {
       Step step = w.begin();
       const Lease first = w.forward(step);
       (void)w.forward(step, 1);
     }},
    {"AStreamOfAnotherDevice",
     ErrorCode::kInvalidArgument,
     {"acquire", "another device", "\"host\"", "give a Stream"},
     [](World& w) {
       const auto device = make_host_device({.memory_bytes = 1_MiB});
       const Stream stream(*device, "other");
       Step step = w.begin();
       (void)step.acquire(UnitId{0}, Pass::kForward, stream);
     }},
    {"AStreamThatWasMovedFrom",
     ErrorCode::kInvalidArgument,
     {"acquire", "stream", "is empty", "give a Stream"},
     [](World& w) {
       Stream stream(*w.device, "other");
       const Stream other = std::move(stream);
       Inference inference = w.engine->begin_inference();
       (void)inference.acquire(UnitId{0}, stream);  // NOLINT(bugprone-use-after-move)
     }},
};
SLUICE_MISUSES(Leases, kLeases);

// The next step may overwrite what the lease has lent, so nothing may compute with it any more.
TEST(AbandonedStep, AwaitsWhatComputesWithItsLeases) {
  std::atomic<bool> has_computed = false;
  MisuseWorld world;
  world.open();
  std::optional<Step> step(world.begin());
  const Lease lease = world.forward(*step);
  world.device->launch(world.stream.id(), [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    has_computed = true;
  });
  step.reset();
  EXPECT_TRUE(has_computed);
}

}  // namespace
}  // namespace sluice::test
