// The rates of initialize, read_state, save and restore, as shares of what the drive gives `bench
// io`. Each operation lies between two slices of `bench io`, which read and write fresh files of a
// quarter of the state, since a drive's own rate may drift by a quarter within a minute. Values
// come from memory; files are read past the page cache. A benchmark: it asserts nothing.
//
//   state_bench DIR [GB of state = 4] [pairs = 20] [lanes; default: as many as Sluice chooses]
//
// Takes about three and a half times the state's size in DIR, and some 15 s a pair.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
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
constexpr std::uint64_t kSlicesPerState = 4;  // a slice of `bench io` has this part of the state

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

// No lanes: Sluice chooses.
Config config_of(const std::string& directory, std::uint32_t lanes) {
  Config config;
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.paths = {directory};
  config.memory.host_bytes = 1_GiB;
  if (lanes != 0) config.optimizer.lanes = lanes;
  return config;
}

// Seconds per byte of `bench io`, at 4 MiB and depth 16.
struct DriveTimes {
  double read = 0;
  double fresh = 0;  // writes into a fresh file, as all writes of the operations are
};

DriveTimes mean_of(const DriveTimes& a, const DriveTimes& b) {
  return {.read = (a.read + b.read) / 2, .fresh = (a.fresh + b.fresh) / 2};
}

// One slice: a fresh file is written and then read. Neither making the file nor touching the memory
// counts.
DriveTimes measure_drive(const std::string& directory, std::uint64_t slice_bytes) {
  std::chrono::steady_clock::time_point begin;
  IoBench io({.paths = {directory},
              .file_bytes = slice_bytes,
              .request_bytes_max = kRequestBytes,
              .depth_max = kDepth},
             [&](std::span<std::byte> memory, std::span<const int> files) {
               std::string note;
               Config::Storage storage;
               storage.queue_depth = kDepth;
               auto queue = open_io_queue(storage, {.memory = memory, .files = files}, note);
               begin = std::chrono::steady_clock::now();
               return queue;
             });
  const std::chrono::duration<double> written = std::chrono::steady_clock::now() - begin;
  const IoMeasurement drive =
      io.measure({.pattern = IoPattern::kRead, .request_bytes = kRequestBytes, .depth = kDepth});
  return {.read = drive.seconds / static_cast<double>(drive.bytes),
          .fresh = written.count() / static_cast<double>(drive.bytes)};
}

double percentile(std::vector<double> values, double share) {
  std::ranges::sort(values);
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
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
    before_ = slice();
  }
  ~StateBench() { remove_checkpoints(); }
  StateBench(const StateBench&) = delete;
  StateBench& operator=(const StateBench&) = delete;

  // A pair of each operation and `bench io`.
  void pair() {
    auto device = make_host_device({.memory_bytes = 256_MiB});
    auto engine = std::make_unique<Engine>(config_, model_, *device);
    measure("initialize", {.write_bytes = bytes()}, [&] { engine->initialize(values()); });
    measure("read_state", {.read_bytes = bytes()}, [&] { read_all(*engine); });
    measure("save", {.read_bytes = bytes(), .write_bytes = bytes()},
            [&] { (void)engine->save(root_, {.keep = 1}); });
    engine.reset();
    device = make_host_device({.memory_bytes = 256_MiB});
    engine = std::make_unique<Engine>(config_, model_, *device);
    forget_pages();
    measure("restore", {.read_bytes = bytes(), .write_bytes = bytes()}, [&] {
      const OpenCheckpoint opened = open_checkpoint(root_ + "/latest");
      engine->restore(*opened.source);
    });
    remove_checkpoints();
  }

  void summarize() const {
    fmt::print(
        "\n| operation | pairs | share of bench io [p10, p90] | GB/s | processor, s per GB "
        "|\n|---|---|---|---|---|\n");
    for (const auto& [name, found] : found_) {
      const auto middle = [](const std::vector<double>& values) { return percentile(values, 0.5); };
      fmt::print("| {} | {} | {:.2f} [{:.2f}, {:.2f}] | {:.2f} | {:.2f} |\n", name,
                 found.shares.size(), middle(found.shares), percentile(found.shares, 0.1),
                 percentile(found.shares, 0.9), middle(found.rates), middle(found.cpu));
    }
    const auto line = [](std::string_view what, const std::vector<double>& rates) {
      fmt::print("bench io, {}: {:.2f} [{:.2f}, {:.2f}] GB/s in {} slices\n", what,
                 percentile(rates, 0.5), percentile(rates, 0.1), percentile(rates, 0.9),
                 rates.size());
    };
    line("read", read_rates_);
    line("write into fresh files", fresh_rates_);
  }

 private:
  struct Moved {
    std::uint64_t read_bytes = 0;
    std::uint64_t write_bytes = 0;
  };
  struct Found {
    std::vector<double> shares;
    std::vector<double> rates;  // GB/s
    std::vector<double> cpu;    // s per GB
  };

  std::uint64_t bytes() const { return model_.element_count() * kStateBytes; }
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
    for (const TensorPlace& tensor : engine.tensors())
      engine.read_state(tensor.id, StateKind::kMaster, 0,
                        std::as_writable_bytes(std::span(values)));
  }
  void remove_checkpoints() const {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  void forget_pages() const {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root_)) {
      if (!entry.is_regular_file()) continue;
      const UniqueFd file(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
      (void)::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
    }
  }

  DriveTimes slice() {
    const DriveTimes times = measure_drive(config_.storage.paths[0], bytes() / kSlicesPerState);
    read_rates_.push_back(1e-9 / times.read);
    fresh_rates_.push_back(1e-9 / times.fresh);
    return times;
  }
  // The time of `bench io` for the same bytes, reads and writes one after the other, as a share.
  // The slice after one operation is the one before the next.
  void measure(const std::string& name, const Moved& moved, const std::function<void()>& work) {
    const double cpu_begin = cpu_seconds();
    const double seconds = seconds_of(work);
    const double cpu_s = cpu_seconds() - cpu_begin;
    const DriveTimes after = slice();
    const DriveTimes drive = mean_of(before_, after);
    before_ = after;
    const auto read = static_cast<double>(moved.read_bytes);
    const auto written = static_cast<double>(moved.write_bytes);
    const double gigabytes = (read + written) * 1e-9;
    const double share = (read * drive.read + written * drive.fresh) / seconds;
    found_[name].shares.push_back(share);
    found_[name].rates.push_back(gigabytes / seconds);
    found_[name].cpu.push_back(cpu_s / gigabytes);
    fmt::print(
        "{:10} {:6.2f} GB/s: {:.2f} of bench io (read {:.2f}, fresh files {:.2f} GB/s); {:.0f} "
        "Mparam/s, CPU {:.2f} s/GB\n",
        name, gigabytes / seconds, share, 1e-9 / drive.read, 1e-9 / drive.fresh,
        static_cast<double>(model_.element_count()) * 1e-6 / seconds, cpu_s / gigabytes);
    (void)std::fflush(stdout);
  }

  Config config_;
  ModelSpec model_;
  std::string root_;
  std::vector<float> values_;
  DriveTimes before_;
  std::map<std::string, Found> found_;
  std::vector<double> read_rates_;  // of bench io, in GB/s
  std::vector<double> fresh_rates_;
};

}  // namespace
}  // namespace sluice

int main(int count, char** arguments) {
  if (count < 2) {
    fmt::print("state_bench DIR [GB of state] [pairs] [lanes]\n");
    return 2;
  }
  const auto number = [&](int index, double usual) {
    return index < count ? std::strtod(arguments[index], nullptr) : usual;
  };
  sluice::StateBench bench(arguments[1], static_cast<std::uint64_t>(number(2, 4) * 1e9),
                           static_cast<std::uint32_t>(number(4, 0)));
  const int pairs = static_cast<int>(number(3, 20));
  for (int pair = 0; pair < pairs; ++pair) bench.pair();
  if (pairs > 0) bench.summarize();
  return 0;
}
