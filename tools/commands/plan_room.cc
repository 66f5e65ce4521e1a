#include "tools/commands/plan_room.h"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/sharding.h"
#include "engine/plan/striping.h"
#include "io/direct_file.h"
#include "tools/gpt/train/run_memory.h"

namespace sluice {
namespace {

constexpr std::uint64_t kHostEnough = std::uint64_t{1} << 50;  // for what the device leaves over

std::string room_of(const PlanSubject& subject) {
  const std::string bytes = format_bytes(*subject.drive_bytes);
  if (subject.sharing_ranks == 1) return "the drives have " + bytes;
  return fmt::format("this rank's share of the drives, which {} ranks have in common, is {}",
                     subject.sharing_ranks, bytes);
}

// Why the drives that the options describe have no room for so many bytes; empty where they have.
std::string drive_obstacle(const PlanSubject& subject, std::uint64_t needed_bytes) {
  if (!subject.drive_bytes || needed_bytes <= *subject.drive_bytes) return {};
  return fmt::format(
      "storage needs {} for each rank, but {}; take more or larger drives, keep more of the state "
      "in memory, or take smaller moments (optimizer.state)",
      format_bytes(needed_bytes), room_of(subject));
}

// The same for this machine's drives. Each path takes its share, to within a block, and several
// paths may be on one file system. A durable store may have its files already.
std::string drive_obstacle_here(const PlanSubject& subject, std::uint64_t needed_bytes) {
  const Config::Storage& storage = subject.request.config.storage;
  if (subject.drive_bytes || needed_bytes == 0 || !storage.state.name.empty()) return {};
  const std::vector<double> weights = storage_weights(storage);
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::map<dev_t, double> share_of_device;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const std::string& path = storage.paths[i];
    const auto free = static_cast<double>(free_bytes(path));
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) continue;
    double& needed = share_of_device[status.st_dev];
    needed += weights[i] / sum * static_cast<double>(needed_bytes);
    if (needed > free)
      return fmt::format(
          "the run needs {} on the drive of \"{}\", which has {} free; free space "
          "there, name more drives in storage.paths, or keep more of the state in "
          "memory",
          format_bytes(static_cast<std::uint64_t>(needed)), path,
          format_bytes(static_cast<std::uint64_t>(free)));
  }
  return {};
}

// Why `sluice train` would refuse pools of that size, and so many bytes on storage, here.
// Fails as `sluice train` does where a path or the calibration of the drives is not there.
std::string obstacle_here(const PlanSubject& subject, const HostMemory& with_its_pools,
                          std::uint64_t nvme_bytes) {
  if (!subject.is_of_this_machine) return {};
  if (subject.request.config.memory.check == RoomCheck::kError) {
    if (auto shortage = shortage_of(with_its_pools)) return *shortage;
  }
  return drive_obstacle_here(subject, nvme_bytes);
}

std::string obstacle_here(const PlanSubject& subject, const Placement& placement) {
  return obstacle_here(subject, with_pools(subject.host, placement), placement.nvme_bytes());
}

// For what the config does not ask for: drives that are not there are a reason against it alone.
template <class... Arguments>
std::string obstacle_elsewhere(const PlanSubject& subject, const Arguments&... arguments) {
  try {
    return obstacle_here(subject, arguments...);
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

std::optional<double> most_tokens(const PlanSubject& subject, const ModelOfTokens& model_of,
                                  std::uint64_t gpu_bytes, std::uint64_t sequence,
                                  std::uint32_t ranks) {
  Config config = subject.request.config;
  config.memory.host_bytes = kHostEnough;
  const RunMachine machine{.ranks = ranks, .device_is_host = false};
  // The pools may hold activations, too, so that each number of tokens has its own plan.
  const auto fits = [&](double tokens) {
    const PlanModel model = model_of(tokens);
    if (model.activation_bytes >= gpu_bytes) return false;
    config.memory.device_bytes = gpu_bytes - model.activation_bytes;
    const ModelSpec valid = validated(model.spec);
    const Layout layout = plan_layout(config, valid, shard_of(config.sharding, /*rank=*/0, ranks));
    std::string obstacle;
    return try_plan(config, valid, layout, machine, obstacle).has_value();
  };
  if (subject.activation_bytes >= kPlannedBytesMax || fits(subject.tokens)) return std::nullopt;
  const double micro_batches = subject.request.micro_batches;
  std::uint64_t low = sequence - 1;  // of a micro-batch; too few for one
  auto high =
      std::max(sequence, static_cast<std::uint64_t>(std::ceil(subject.tokens / micro_batches)));
  while (high - low > 1) {
    const std::uint64_t middle = low + (high - low) / 2;
    (fits(micro_batches * static_cast<double>(middle)) ? low : high) = middle;
  }
  return low < sequence ? 0 : micro_batches * static_cast<double>(low);
}

std::string obstacle_here(const PlanSubject& subject, const PlannedPlacement& planned) {
  if (!planned.obstacle.empty()) return {};
  return obstacle_here(subject, planned.placement);
}

void check_room(const PlanSubject& subject, std::vector<PlannedPlacement>& all) {
  for (PlannedPlacement& planned : all) {
    if (planned.obstacle.empty())
      planned.obstacle = drive_obstacle(subject, planned.placement.nvme_bytes());
    else if (planned.obstacle.starts_with("memory.device = ") &&
             !subject.origin_of_device_bytes.empty())  // before the list of pools
      planned.obstacle.insert(
          in_short(planned.obstacle).size(),
          fmt::format("; {}{}", subject.origin_of_device_bytes,
                      &planned == all.data() ? subject.remedy_of_device_bytes : ""));
  }
  for (std::size_t i = 1; i < all.size(); ++i)
    if (all[i].obstacle.empty()) all[i].obstacle = obstacle_elsewhere(subject, all[i].placement);
  PlannedPlacement& own = all.front();
  const auto lacks_room = [&](const PlannedChange& change) {
    return !drive_obstacle(subject, change.placement.nvme_bytes()).empty() ||
           !obstacle_elsewhere(subject, change.placement).empty();
  };
  std::erase_if(own.policies, [&](const PlannedChange& change) {
    return change.policy != own.policy && lacks_room(change);
  });
  if (own.on_other_processor && lacks_room(*own.on_other_processor)) own.on_other_processor.reset();
}

std::vector<MatrixRow> matrix_of(const PlanSubject& subject) {
  std::vector<MatrixRow> rows = plan_matrix(subject.request);
  for (MatrixRow& row : rows) {
    if (row.obstacle.empty()) row.obstacle = drive_obstacle(subject, row.nvme_bytes);
    if (!row.obstacle.empty()) continue;
    HostMemory host = subject.host;
    host.device_pool_bytes = host.device_is_host ? row.device_bytes : 0;
    host.host_pool_bytes = row.host_bytes;
    row.obstacle = obstacle_elsewhere(subject, host, row.nvme_bytes);
  }
  return rows;
}

}  // namespace sluice
