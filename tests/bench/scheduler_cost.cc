// The scheduler's cost per block and step, as the number of blocks grows: an engine with everything
// on storage over a queue that moves nothing, one small block after another. Prints the processor
// time of the scheduler's thread, without the tasks that the application's thread runs in its
// place, beside the wall time of a step, which includes the arithmetic on 4,096 elements per block.
// It is a benchmark, not a test: it asserts nothing.
//
//   scheduler_cost [DIRECTORY [BLOCKS...]]     default: /var/tmp 1000 10000 100000
//
// A million blocks need 9 GiB of memory and 50 GB in the directory, none of which is written.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "io/io_queue.h"

namespace sluice {
namespace {

constexpr std::uint64_t kBlockElements = 4096;
constexpr std::uint64_t kBlocksPerUnit = 64;
constexpr int kSteps = 7;  // measured, after two

class EmptyQueue : public IoQueue {
 public:
  void submit(std::span<IoRequest* const> requests) override {
    for (IoRequest* request : requests) {
      const bool is_read = request->kind == IoKind::kRead;
      (is_read ? read_bytes_ : write_bytes_) += request->length_bytes;
      request->error = 0;
      request->transferred_bytes = request->length_bytes;
      request->on_complete(*request);
    }
  }
  void wait_idle() override {}
  IoCounters counters() const override {
    IoCounters counters;
    counters.read_bytes = read_bytes_;
    counters.write_bytes = write_bytes_;
    return counters;
  }
  std::string_view name() const override { return "empty"; }

 private:
  std::atomic<std::uint64_t> read_bytes_ = 0;
  std::atomic<std::uint64_t> write_bytes_ = 0;
};

// Nanoseconds that the thread of that name has run.
std::uint64_t thread_run_ns(const std::string& thread) {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    std::uint64_t run_ns = 0;
    if (name == thread && std::ifstream(task.path() / "schedstat") >> run_ns) return run_ns;
  }
  return 0;
}

ModelSpec model_of(std::uint64_t blocks) {
  ModelSpec model;
  const std::uint64_t units = std::max<std::uint64_t>(1, blocks / kBlocksPerUnit);
  for (std::uint64_t unit = 0; unit < units; ++unit)
    model.units.push_back({.name = fmt::format("u{}", unit),
                           .tensors = {{.name = fmt::format("w{}", unit),
                                        .shape = {blocks / units, kBlockElements}}}});
  return validated(model);
}

void train(Engine& engine, const ModelSpec& model, const Stream& stream) {
  Step step = engine.begin_step({.learning_rate = 1e-3});
  for (const UnitId unit : model.forward_order) (void)step.acquire(unit, Pass::kForward, stream);
  for (const UnitId unit : model.backward_order) (void)step.acquire(unit, Pass::kBackward, stream);
  (void)step.finish();
  engine.drain();
}

void measure(const std::string& directory, std::uint64_t blocks, OverlapPolicy policy) {
  Config config;
  config.storage.paths = {directory};
  config.storage.block_elements = kBlockElements;
  config.storage.verify = Verify::kOff;
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.device_bytes = 64_MiB;
  config.memory.host_bytes = blocks * kBlockElements * 2 + 256_MiB;
  config.optimizer.overlap = policy;
  const ModelSpec model = model_of(blocks);
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  Engine engine = EngineOverQueue::make(config, model, *device, [](std::unique_ptr<IoQueue>) {
    return std::make_unique<EmptyQueue>();
  });
  engine.initialize([](const TensorPlace&, std::uint64_t, std::span<float> values) {
    std::ranges::fill(values, 0.0f);
  });
  const Stream stream(*device, "compute");
  train(engine, model, stream);
  train(engine, model, stream);
  std::vector<double> run_ns;
  std::vector<double> wall_ns;
  for (int step = 0; step < kSteps; ++step) {
    const std::uint64_t run_begin = thread_run_ns("sluice-sched");
    const std::uint64_t begin = steady_now_ns();
    train(engine, model, stream);
    wall_ns.push_back(static_cast<double>(steady_now_ns() - begin));
    run_ns.push_back(static_cast<double>(thread_run_ns("sluice-sched") - run_begin));
  }
  std::ranges::sort(run_ns);
  std::ranges::sort(wall_ns);
  const auto count = static_cast<double>(layout_of(engine).blocks().size());
  fmt::print("{:<12} {:>9} {:>14.2f} [{:.2f}, {:.2f}] {:>14.3f}\n", name_of(policy), count,
             run_ns[kSteps / 2] / count / 1e3, run_ns.front() / count / 1e3,
             run_ns.back() / count / 1e3, wall_ns[kSteps / 2] / 1e9);
}

}  // namespace
}  // namespace sluice

int main(int count, char** words) {
  const std::string directory = count > 1 ? words[1] : "/var/tmp";
  std::vector<std::uint64_t> sizes;
  for (int i = 2; i < count; ++i) sizes.push_back(std::strtoull(words[i], nullptr, 10));
  if (sizes.empty()) sizes = {1000, 10000, 100000};
  fmt::print("policy          blocks   scheduler us a block             step s\n");
  for (const std::uint64_t blocks : sizes) {
    for (const sluice::OverlapPolicy policy :
         {sluice::OverlapPolicy::kSerial, sluice::OverlapPolicy::kDeferred})
      sluice::measure(directory, blocks, policy);
  }
}
