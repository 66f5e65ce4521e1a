// The cost of a status page per step: processor time of StatusPublisher::step_ended(), the call
// that `sluice train`, Python and C make after every step. An engine trains small units, whose
// blocks lie in as many folders as a page has places for. Prints the cost of the call behind a
// step, when the step's own data is in the caches, with the two readings of the clock around it;
// what these readings cost alone; and the cost of calls one after another. A benchmark: it asserts
// nothing.
//
//   XDG_RUNTIME_DIR=DIR status_cost [DIRECTORY [STEPS]]     default: /var/tmp 1000
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/status_publisher.h>
#include <sluice/units.h>
#include "engine/run/status_page.h"

namespace sluice {
namespace {

constexpr int kWarmSteps = 10;
constexpr int kBatch = 1000;
constexpr int kBatches = 51;
constexpr std::uint64_t kBlockElements = 4096;
constexpr StepFigures kFigures{.loss = 2.5, .tokens = 4096, .peak_flops = 1e12};

double cpu_now_us() {
  timespec now{};
  (void)::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

void print(const char* what, std::vector<double> times_us) {
  std::ranges::sort(times_us);
  const std::size_t last = times_us.size() - 1;
  fmt::print(
      "{:<30}{:>8.3f}{:>8.3f}{:>8.3f}{:>8.3f}{:>8.3f}{:>8.1f}\n", what,
      std::accumulate(times_us.begin(), times_us.end(), 0.0) / static_cast<double>(times_us.size()),
      times_us[times_us.size() / 2], times_us[last / 10], times_us[last - last / 10],
      times_us[last - last / 100], times_us[last]);
}

// One for each drive that a page shows; removed at the end.
struct Folders {
  explicit Folders(const std::string& directory)
      : path(fmt::format("{}/sluice-status-cost-{}", directory, ::getpid())) {
    for (std::size_t drive = 0; drive < kStatusDrives; ++drive) {
      drives.push_back(fmt::format("{}/{}", path, drive));
      std::filesystem::create_directories(drives.back());
    }
  }
  ~Folders() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  Folders(const Folders&) = delete;
  Folders& operator=(const Folders&) = delete;

  std::string path;
  std::vector<std::string> drives;
};

class Training {
 public:
  explicit Training(const Config& config) : engine_(config, model_, *device_) {
    engine_.initialize([](const TensorPlace&, std::uint64_t, std::span<float> values) {
      std::ranges::fill(values, 0.5f);
    });
  }

  const Engine& engine() const { return engine_; }
  StepReport step() {
    Step step = engine_.begin_step({.learning_rate = 1e-3});
    for (const UnitId unit : model_.forward_order)
      (void)step.acquire(unit, Pass::kForward, stream_);
    for (const UnitId unit : model_.backward_order)
      (void)step.acquire(unit, Pass::kBackward, stream_);
    return step.finish();
  }

 private:
  static ModelSpec model() {
    ModelSpec model;
    for (int unit = 0; unit < 4; ++unit)
      model.units.push_back({.name = fmt::format("u{}", unit),
                             .tensors = {{.name = fmt::format("w{}", unit),
                                          .shape = {2 * kStatusDrives, kBlockElements}}}});
    return validated(model);
  }

  const ModelSpec model_ = model();
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  Engine engine_;
  Stream stream_{*device_, "compute"};
};

int measure(const std::string& directory, int steps) {
  const Folders folders(directory);
  Config config;
  config.storage.paths = folders.drives;
  config.storage.block_elements = kBlockElements;
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.device_bytes = 64_MiB;
  config.memory.host_bytes = 64_MiB;
  config.threads = 2;
  Training training(config);
  StatusPublisher status(training.engine(), {.steps = 1'000'000, .flops_per_token = 1e6});
  StepReport report;
  for (int i = 0; i < kWarmSteps; ++i) report = training.step();
  std::vector<double> behind_steps_us, clock_us, batches_us;
  for (int i = 0; i < steps; ++i) {
    report = training.step();
    const double begin_us = cpu_now_us();
    status.step_ended(report, kFigures);
    behind_steps_us.push_back(cpu_now_us() - begin_us);
  }
  const std::vector<FoundPage> pages = read_status_pages(status_folder());
  if (pages.empty() || !pages[0].status) {
    fmt::print("there is no status page; set XDG_RUNTIME_DIR to an empty folder. {}\n",
               status.problem());
    return 2;
  }
  fmt::print("a page of {} bytes with {} drives, {} steps\n", sizeof(RunStatus),
             pages[0].status->drive_count, pages[0].status->step);
  for (int i = 0; i < kBatches; ++i) {
    double begin_us = cpu_now_us();
    clock_us.push_back(cpu_now_us() - begin_us);
    begin_us = cpu_now_us();
    for (int call = 0; call < kBatch; ++call) status.step_ended(report, kFigures);
    batches_us.push_back((cpu_now_us() - begin_us) / kBatch);
  }
  fmt::print("{:<30}{:>8}{:>8}{:>8}{:>8}{:>8}{:>8}\n", "us of CPU", "mean", "median", "10 %",
             "90 %", "99 %", "most");
  print("behind a step, with the clock", behind_steps_us);
  print("the clock alone", clock_us);
  print("one after another", batches_us);
  return 0;
}

}  // namespace
}  // namespace sluice

int main(int count, char** words) {
  return sluice::measure(count > 1 ? words[1] : "/var/tmp",
                         count > 2 ? std::max(1, std::atoi(words[2])) : 1000);
}
