// Each row of a table of misuses runs in this environment. The environment has an engine with
// initial values, and the device, the stream and the folder of the engine. A row has a mistake of
// an application, the code of the error, and the words that the message has to contain. After the
// error, the engine has to train one step. The trained state must have the same bits as the state
// of an engine that was not misused. A row skips this check if its ends_engine is true.
//
// Thread rule: one thread at a time.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/error.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {

struct MisuseWorld {
  // The model is the toy model. Unit 2 of the model, "h.1", is frozen. The state is on storage, and
  // the parameters are bf16.
  MisuseWorld() {
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    model.concurrent_leases = 1;
  }

  void open() {
    engine = std::make_unique<Engine>(config, model, *device);
    engine->initialize(toy_values());
  }
  Step begin() const { return engine->begin_step({.learning_rate = 1e-2}); }
  Lease forward(Step& step, std::uint32_t unit = 0) const {
    return step.acquire(UnitId{unit}, Pass::kForward, stream);
  }
  void walk(Step& step) const { walk_step(step, model, *engine, *device, stream, config, 1); }
  // The function makes all uses that come before the backward use of `unit`. The function then
  // makes this use, and returns the lease on `unit`.
  Lease backward(Step& step, std::uint32_t unit) const {
    const ModelSpec all = validated(model);
    for (const UnitId id : all.forward_order) (void)step.acquire(id, Pass::kForward, stream);
    for (const UnitId id : all.backward_order) {
      if (id == UnitId{unit}) return step.acquire(id, Pass::kBackward, stream);
      (void)step.acquire(id, Pass::kBackward, stream);
    }
    throw std::logic_error("the model has no such unit");
  }
  void read(std::uint32_t tensor, StateKind kind, std::uint64_t first, std::size_t size_bytes) {
    bytes.resize(size_bytes);
    engine->read_state(TensorId{tensor}, kind, first, bytes);
  }
  StateBytes train() const {
    Step step = begin();
    walk(step);
    (void)step.finish();
    engine->drain();
    return read_state(*engine);
  }

  TempDirectory directory;
  Config config = toy_config(directory.path());
  ModelSpec model = toy_model({2});
  std::vector<std::byte> bytes;
  std::unique_ptr<HostDevice> device = make_host_device({.memory_bytes = 64_MiB});
  Stream stream{*device, "compute"};
  std::unique_ptr<Engine> engine;
};

using World = MisuseWorld;

struct Misuse {
  std::string name;
  ErrorCode code;
  std::vector<std::string> words;
  std::function<void(World&)> call;
  std::function<void(World&)> prepare = {};  // before the engine is made
  bool ends_engine = false;                  // the misuse trains or closes the engine
};
inline std::ostream& operator<<(std::ostream& out, const Misuse& row) {
  return out << row.name;
}

class MisuseTest : public testing::TestWithParam<Misuse> {};

// Makes a test suite in which each row is a case. Each case has the name of its row.
#define SLUICE_MISUSES(suite, rows)                                    \
  INSTANTIATE_TEST_SUITE_P(suite, MisuseTest, testing::ValuesIn(rows), \
                           [](const auto& row) { return row.param.name; })

}  // namespace sluice::test
