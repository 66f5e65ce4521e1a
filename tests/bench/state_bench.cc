// The rates of initialize, read_state, save and restore, as shares of what the drive gives `bench
// io` just before, in the same run. Values come from memory; files are read past the page cache. A
// benchmark: it asserts nothing.
//
//   state_bench DIR [GB of state = 4] [rounds = 3] [lanes = 8]
//
// Takes about four times the state's size in DIR.
#include <fcntl.h>
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
        model_(model_of(std::max<std::uint64_t>(state_bytes / kStateBytes / kUnitElements, 1))),
        root_(directory + "/state_bench.checkpoints"),
        values_(4 << 20) {
    for (std::size_t i = 0; i < values_.size(); ++i)
      values_[i] = static_cast<float>(i * 2654435761u % 65521) * 1e-5f;
    const double fresh_s = seconds_of([&] {
      io_ = std::make_unique<IoBench>(IoBenchOptions{.paths = {directory},
                                                     .file_bytes = bytes(),
                                                     .request_bytes_max = kRequestBytes,
                                                     .depth_max = kDepth},
                                      [&](std::span<std::byte> memory, std::span<const int> files) {
                                        std::string note;
                                        Config::Storage storage;
                                        storage.queue_depth = kDepth;
                                        return open_io_queue(
                                            storage, {.memory = memory, .files = files}, note);
                                      });
    });
    fmt::print("state {}, {} units; bench io writes fresh files at {:.2f} GB/s\n",
               format_bytes(bytes()), model_.units.size(), rate(bytes(), fresh_s));
  }
  ~StateBench() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  StateBench(const StateBench&) = delete;
  StateBench& operator=(const StateBench&) = delete;

  void round() {
    auto device = make_host_device({.memory_bytes = 256_MiB});
    auto engine = std::make_unique<Engine>(config_, model_, *device);
    report("initialize", IoPattern::kWrite, bytes(), [&] { engine->initialize(values()); });
    report("read_state", IoPattern::kRead, bytes(), [&] { read_all(*engine); });
    report("save", IoPattern::kMixed, 2 * bytes(), [&] { (void)engine->save(root_, {.keep = 1}); });
    engine.reset();
    device = make_host_device({.memory_bytes = 256_MiB});
    engine = std::make_unique<Engine>(config_, model_, *device);
    forget_pages();
    report("restore", IoPattern::kMixed, 2 * bytes(), [&] {
      const OpenCheckpoint opened = open_checkpoint(root_ + "/latest");
      engine->restore(*opened.source);
    });
  }

  void summarize() const {
    for (const auto& [name, ratios] : ratios_) {
      std::vector<double> sorted = ratios;
      std::ranges::sort(sorted);
      fmt::print("{:10} {:.2f} of bench io, {:.2f} to {:.2f}\n", name, sorted[sorted.size() / 2],
                 sorted.front(), sorted.back());
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
  void report(const std::string& name, IoPattern pattern, std::uint64_t moved_bytes,
              const std::function<void()>& work) {
    const IoMeasurement drive =
        io_->measure({.pattern = pattern, .request_bytes = kRequestBytes, .depth = kDepth});
    const double seconds = seconds_of(work);
    const double drive_rate = rate(drive.bytes, drive.seconds);
    const double own_rate = rate(moved_bytes, seconds);
    ratios_[name].push_back(own_rate / drive_rate);
    fmt::print("{:10} {:6.2f} GB/s, bench io {:5} {:6.2f} GB/s: {:.2f}; {:.0f} Mparam/s\n", name,
               own_rate, name_of(pattern), drive_rate, own_rate / drive_rate,
               static_cast<double>(model_.element_count()) * 1e-6 / seconds);
  }

  Config config_;
  ModelSpec model_;
  std::string root_;
  std::vector<float> values_;
  std::unique_ptr<IoBench> io_;
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
