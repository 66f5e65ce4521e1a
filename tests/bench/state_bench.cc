// The rates of initialize, read_state, save and restore, as shares of what the drive gives `bench
// io` just before, in the same run. Values come from memory; files are read past the page cache. A
// benchmark: it asserts nothing.
//
//   state_bench DIR [GB of state = 4] [rounds = 3] [lanes = 8]
//
// Takes about four times the state's size in DIR.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/checkpoint.h>
#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "base/unique_fd.h"
#include "engine/plan/layout.h"
#include "engine/store/storage_queue.h"
#include "tools/bench/io_bench.h"

namespace sluice {
namespace {

constexpr std::uint64_t kUnitElements = 12 << 20;
constexpr std::uint64_t kStateBytes = 12;  // per element, with bf16 parameters
constexpr std::uint64_t kRequestBytes = 4_MiB;
constexpr std::uint32_t kDepth = 16;

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double cpu_seconds() {
  rusage usage{};
  (void)::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

ModelSpec model_of(std::uint64_t units) {
  ModelSpec model;
  for (std::uint64_t unit = 0; unit < units; ++unit)
    model.units.push_back({.name = fmt::format("h.{}", unit),
                           .tensors = {{.name = fmt::format("h.{}.w", unit),
                                        .shape = {kUnitElements / 4096, 4096}}}});
  return model;
}

Config config_of(const std::string& directory, std::uint32_t lanes) {
  Config config;
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.paths = {directory};
  config.memory.host_bytes = 1_GiB;
  config.optimizer.lanes = lanes;
  return config;
}

class StateBench {
 public:
  StateBench(const std::string& directory, std::uint64_t state_bytes, std::uint32_t lanes)
      : config_(config_of(directory, lanes)),
        model_(model_of(div_ceil(state_bytes, kStateBytes * kUnitElements))),
        root_(directory + "/state_bench.checkpoints"),
        values_(4 << 20) {
    for (std::size_t i = 0; i < values_.size(); ++i)
      values_[i] = static_cast<float>(i * 2654435761u % 65521) * 1e-5f;
    fmt::print("state of {:.2f} GB, {} units\n", static_cast<double>(bytes()) * 1e-9,
               model_.units.size());
  }
  ~StateBench() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  StateBench(const StateBench&) = delete;
  StateBench& operator=(const StateBench&) = delete;

  void round() {
    measure_drive();
    auto device = make_host_device({.memory_bytes = 256_MiB});
    auto engine = std::make_unique<Engine>(config_, model_, *device);
    report("initialize", {.write_bytes = bytes()}, [&] { engine->initialize(values()); });
    report("read_state", {.read_bytes = bytes()}, [&] { read_all(*engine); });
    report("save", {.read_bytes = bytes(), .write_bytes = bytes()},
           [&] { (void)engine->save(root_, {.keep = 1}); });
    engine.reset();
    device = make_host_device({.memory_bytes = 256_MiB});
    engine = std::make_unique<Engine>(config_, model_, *device);
    forget_pages();
    report("restore", {.read_bytes = bytes(), .write_bytes = bytes()}, [&] {
      const OpenCheckpoint opened = open_checkpoint(root_ + "/latest");
      engine->restore(*opened.source);
    });
  }

  void summarize() const {
    for (const auto& [name, ratios] : ratios_) {
      std::vector<double> sorted = ratios;
      std::ranges::sort(sorted);
      fmt::print("{:10} {:.2f} of bench io in fresh files, {:.2f} to {:.2f}\n", name,
                 sorted[sorted.size() / 2], sorted.front(), sorted.back());
    }
  }

 private:
  std::uint64_t bytes() const { return model_.element_count() * kStateBytes; }
  static double rate(std::uint64_t bytes, double seconds) {
    return static_cast<double>(bytes) * 1e-9 / seconds;
  }
  InitialValues values() const {
    return [this](const TensorPlace&, std::uint64_t first, std::span<float> target) {
      for (std::size_t at = 0; at < target.size();) {
        const std::size_t from = (first + at) % values_.size();
        const std::size_t count = std::min(values_.size() - from, target.size() - at);
        std::copy_n(values_.begin() + static_cast<std::ptrdiff_t>(from), count,
                    target.begin() + static_cast<std::ptrdiff_t>(at));
        at += count;
      }
    };
  }
  // Masters need both planes of each block, so this reads all bytes of the state.
  void read_all(Engine& engine) const {
    std::vector<float> values(kUnitElements);
    for (const TensorPlace& tensor : engine.layout().tensors())
      engine.read_state(tensor.id, StateKind::kMaster, 0,
                        std::as_writable_bytes(std::span(values)));
  }
  void forget_pages() const {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root_)) {
      if (!entry.is_regular_file()) continue;
      const UniqueFd file(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
      (void)::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
    }
  }
  struct Moved {
    std::uint64_t read_bytes = 0;
    std::uint64_t write_bytes = 0;
  };

  // The drive's rates now. The first write into fresh files costs more than later ones, and all
  // writes here go into fresh files.
  void measure_drive() {
    std::unique_ptr<IoBench> io;
    fresh_rate_ =
        rate(bytes(), seconds_of([&] {
               io = std::make_unique<IoBench>(
                   IoBenchOptions{.paths = config_.storage.paths,
                                  .file_bytes = bytes(),
                                  .request_bytes_max = kRequestBytes,
                                  .depth_max = kDepth},
                   [&](std::span<std::byte> memory, std::span<const int> files) {
                     std::string note;
                     Config::Storage storage;
                     storage.queue_depth = kDepth;
                     return open_io_queue(storage, {.memory = memory, .files = files}, note);
                   });
             }));
    const auto measured = [&](IoPattern pattern) {
      const IoMeasurement drive =
          io->measure({.pattern = pattern, .request_bytes = kRequestBytes, .depth = kDepth});
      return rate(drive.bytes, drive.seconds);
    };
    read_rate_ = measured(IoPattern::kRead);
    write_rate_ = measured(IoPattern::kWrite);
    fmt::print(
        "bench io: read {:.2f}, write {:.2f}, both at once {:.2f}, write into fresh files {:.2f} "
        "GB/s\n",
        read_rate_, write_rate_, measured(IoPattern::kMixed), fresh_rate_);
  }
  // The time of `bench io` for the same bytes, reads and writes one after the other, as a share.
  void report(const std::string& name, const Moved& moved, const std::function<void()>& work) {
    const double cpu_begin = cpu_seconds();
    const double seconds = seconds_of(work);
    const double cpu_s = cpu_seconds() - cpu_begin;
    const double read_s = static_cast<double>(moved.read_bytes) * 1e-9 / read_rate_;
    const auto written = static_cast<double>(moved.write_bytes) * 1e-9;
    const double fresh_ratio = (read_s + written / fresh_rate_) / seconds;
    ratios_[name].push_back(fresh_ratio);
    const double gigabytes = static_cast<double>(moved.read_bytes) * 1e-9 + written;
    fmt::print(
        "{:10} {:6.2f} GB/s: {:.2f} of bench io in fresh files, {:.2f} of bench io; {:.0f} "
        "Mparam/s, CPU {:.2f} s/GB\n",
        name, gigabytes / seconds, fresh_ratio, (read_s + written / write_rate_) / seconds,
        static_cast<double>(model_.element_count()) * 1e-6 / seconds, cpu_s / gigabytes);
  }

  Config config_;
  ModelSpec model_;
  std::string root_;
  std::vector<float> values_;
  double read_rate_ = 0;  // of bench io, in GB/s
  double write_rate_ = 0;
  double fresh_rate_ = 0;
  std::map<std::string, std::vector<double>> ratios_;
};

}  // namespace
}  // namespace sluice

int main(int count, char** arguments) {
  if (count < 2) {
    fmt::print("state_bench DIR [GB of state] [rounds] [lanes]\n");
    return 2;
  }
  const auto number = [&](int index, double usual) {
    return index < count ? std::strtod(arguments[index], nullptr) : usual;
  };
  sluice::StateBench bench(arguments[1], static_cast<std::uint64_t>(number(2, 4) * 1e9),
                           static_cast<std::uint32_t>(number(4, 8)));
  const int rounds = static_cast<int>(number(3, 3));
  for (int round = 0; round < rounds; ++round) bench.round();
  bench.summarize();
  return 0;
}
