// Queues side by side, one per drive. They have no state in common: each request belongs to one of
// the queues, and every total is the sum over them.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/error.h>
#include "io/io_queue.h"

namespace sluice {
namespace {

class DriveQueues final : public IoQueue {
 public:
  explicit DriveQueues(std::vector<std::unique_ptr<IoQueue>> drives) : drives_(std::move(drives)) {
    SLUICE_CHECK(!drives_.empty(), "at least one drive has a queue");
  }

  void submit(std::span<IoRequest* const> requests) override {
    while (!requests.empty()) {
      // A run of requests for one drive goes there in one piece. A submitted request may be gone,
      // so the end of the run is found first.
      const std::uint32_t drive = requests.front()->drive;
      SLUICE_CHECK(drive < drives_.size(), "a request is for one of the drives");
      const auto run_end = std::ranges::find_if(
          requests, [drive](const IoRequest* request) { return request->drive != drive; });
      const auto run_count = static_cast<std::size_t>(run_end - requests.begin());
      drives_[drive]->submit(requests.first(run_count));
      requests = requests.subspan(run_count);
    }
  }

  void wait_idle() override {
    for (const auto& drive : drives_) drive->wait_idle();
  }

  IoCounters counters() const override {
    IoCounters sum;
    for (const auto& drive : drives_) sum += drive->counters();
    return sum;
  }

  IoCounters drive_counters(std::uint32_t drive) const override {
    return drive < drives_.size() ? drives_[drive]->counters() : IoCounters{};
  }

  std::string_view name() const override { return drives_.front()->name(); }

  std::string_view note() const override {
    for (const auto& drive : drives_) {
      if (!drive->note().empty()) return drive->note();  // the kernel refuses it to all
    }
    return {};
  }

 private:
  std::vector<std::unique_ptr<IoQueue>> drives_;
};

}  // namespace

std::unique_ptr<IoQueue> make_drive_queues(std::vector<std::unique_ptr<IoQueue>> drives) {
  return std::make_unique<DriveQueues>(std::move(drives));
}

}  // namespace sluice
