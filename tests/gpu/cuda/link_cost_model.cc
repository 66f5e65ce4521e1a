#include "tests/gpu/cuda/link_cost_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>

#include <nlohmann/json.hpp>

namespace sluice::test {
namespace {

class Replay {
 public:
  Replay(const LinkCosts& costs, double callback_ns)
      : costs_(costs), callback_ns_(callback_ns), queue_free_ns_(costs.hardware_queues) {}

  void add(const FakeCudaCall& call) {
    if (!call.is_continued) host_ns_ += costs_.call_ns;
    const auto [stream, is_new] =
        streams_.try_emplace(call.stream, Stream{.queue = streams_.size() % queue_free_ns_.size()});
    double& end_ns = stream->second.end_ns;
    double& queue_ns = queue_free_ns_[stream->second.queue];
    double begin_ns = std::max({host_ns_, end_ns, queue_ns});
    double* const engine_ns = engine_of(call.kind);
    if (call.kind == FakeCudaCall::Kind::kWait)
      begin_ns = std::max(begin_ns, events_ns_[call.event]);
    if (engine_ns != nullptr) begin_ns = std::max(begin_ns, *engine_ns);
    queue_ns = begin_ns;
    end_ns = begin_ns + duration_ns(call);
    if (engine_ns != nullptr) *engine_ns = end_ns;
    if (call.kind == FakeCudaCall::Kind::kRecord) events_ns_[call.event] = end_ns;
    if (call.kind == FakeCudaCall::Kind::kCopyUp) {
      if (moving_ns_ == 0) first_ns_ = begin_ns;
      moving_ns_ += moving_ns(call);
      last_ns_ = std::max(last_ns_, end_ns);
    }
  }

  double share() const { return moving_ns_ / (last_ns_ - first_ns_); }

 private:
  struct Stream {
    std::size_t queue = 0;
    double end_ns = 0;
  };

  double moving_ns(const FakeCudaCall& call) const {
    return 1e9 * static_cast<double>(call.size_bytes) / costs_.link_bytes_per_second;
  }

  double* engine_of(FakeCudaCall::Kind kind) {
    if (kind == FakeCudaCall::Kind::kCopyUp) return &up_free_ns_;
    if (kind == FakeCudaCall::Kind::kCopyDown) return &down_free_ns_;
    return nullptr;
  }

  double duration_ns(const FakeCudaCall& call) const {
    switch (call.kind) {
      case FakeCudaCall::Kind::kCopyUp:
      case FakeCudaCall::Kind::kCopyDown: return costs_.copy_gap_ns + moving_ns(call);
      case FakeCudaCall::Kind::kRecord:
      case FakeCudaCall::Kind::kWait: return costs_.event_ns;
      case FakeCudaCall::Kind::kCallback: return callback_ns_;
      case FakeCudaCall::Kind::kCopyInside:
      case FakeCudaCall::Kind::kFill:
      case FakeCudaCall::Kind::kKernel: break;
    }
    return costs_.kernel_ns;
  }

  const LinkCosts& costs_;
  const double callback_ns_;
  double host_ns_ = 0;
  std::vector<double> queue_free_ns_;
  std::map<std::uint64_t, Stream> streams_;
  std::map<std::uint64_t, double> events_ns_;
  double up_free_ns_ = 0;
  double down_free_ns_ = 0;
  double first_ns_ = 0;
  double last_ns_ = 0;
  double moving_ns_ = 0;
};

}  // namespace

LinkCosts read_link_costs(const std::string& path) {
  const nlohmann::json file = nlohmann::json::parse(std::ifstream(path));
  const auto number = [&](const char* name) {
    EXPECT_FALSE(file.at(name).at("source").get<std::string>().empty()) << name;
    return file.at(name).at("value").get<double>();
  };
  return {.link_bytes_per_second = number("link_bytes_per_second"),
          .call_ns = number("call_ns"),
          .copy_gap_ns = number("copy_gap_ns"),
          .event_ns = number("event_ns"),
          .kernel_ns = number("kernel_ns"),
          .callback_least_ns = number("callback_least_ns"),
          .callback_most_ns = number("callback_most_ns"),
          .hardware_queues = static_cast<std::uint32_t>(number("hardware_queues"))};
}

double share_of_link(std::span<const FakeCudaCall> calls, const LinkCosts& costs,
                     double callback_ns) {
  Replay replay(costs, callback_ns);
  for (const FakeCudaCall& call : calls) replay.add(call);
  return replay.share();
}

}  // namespace sluice::test
