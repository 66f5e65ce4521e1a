#include "gpu/ranks/launcher_environment.h"

#include <charconv>
#include <cstring>
#include <string_view>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {
namespace {

constexpr std::uint32_t kRanksMax = 1u << 20;
constexpr std::string_view kSlurm = "Slurm";
constexpr const char* kSlurmTasks = "SLURM_STEP_TASKS_PER_NODE";

struct Launcher {
  std::string_view name;
  const char* rank;
  const char* rank_count;
  const char* local_rank;
  const char* local_rank_count;  // Slurm's is a list
};

constexpr Launcher kLaunchers[] = {
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    // The step's variables: a shell inside an allocation has the job's variables, but is no rank.
    {kSlurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", kSlurmTasks},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
};

[[noreturn]] void refuse_launch(const std::string& message) {
  throw Error(ErrorCode::kConfig, message);
}

std::optional<std::uint32_t> number(const EnvironmentLookup& environment, const char* name,
                                    std::uint32_t maximum) {
  const char* const text = environment(name);
  if (text == nullptr) return std::nullopt;
  std::uint32_t value = 0;
  const char* const end = text + std::strlen(text);
  const auto parsed = std::from_chars(text, end, value);
  if (parsed.ec != std::errc{} || parsed.ptr != end || value > maximum)
    refuse_launch(fmt::format("the environment has {}=\"{}\", which is not a number from 0 to {}",
                              name, text, maximum));
  return value;
}

// Takes digits off the front of `text`. The result is 0 if there is no number from 1 to kRanksMax.
std::uint32_t take_number(std::string_view& text) {
  std::uint32_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc{} || value > kRanksMax) return 0;
  text.remove_prefix(static_cast<std::size_t>(parsed.ptr - text.data()));
  return value;
}

bool take(std::string_view& text, std::string_view part) {
  if (!text.starts_with(part)) return false;
  text.remove_prefix(part.size());
  return true;
}

// Slurm's list of the ranks on each node of a step: "4(x2),3" stands for 4, 4 and 3. Returns the
// entry of this node, if the list has one.
std::optional<std::uint32_t> ranks_of_slurm_node(const EnvironmentLookup& environment) {
  const char* const list = environment(kSlurmTasks);
  const auto node = number(environment, "SLURM_NODEID", kRanksMax);
  if (list == nullptr || !node) return std::nullopt;
  std::optional<std::uint32_t> found;
  std::string_view left = list;
  bool is_list = true;
  for (std::uint64_t first = 0; is_list;) {  // the first node of the next entry
    const std::uint32_t ranks = take_number(left);
    const bool repeats = take(left, "(x");
    const std::uint32_t nodes = repeats ? take_number(left) : 1;
    is_list = ranks != 0 && nodes != 0 && (!repeats || take(left, ")"));
    if (is_list && *node >= first && *node < first + nodes) found = ranks;
    first += nodes;
    if (!is_list || left.empty()) break;
    is_list = take(left, ",");
  }
  if (!is_list)
    refuse_launch(
        fmt::format("the environment has {}=\"{}\", which is no list of the ranks on each "
                    "node, such as 4(x2),3",
                    kSlurmTasks, list));
  return found;
}

// Sets the numbers of this rank among those of its host.
void add_local_ranks(const Launcher& launcher, const EnvironmentLookup& environment,
                     Launch& launch) {
  const auto rank = number(environment, launcher.local_rank, kRanksMax);
  const auto count = launcher.name == kSlurm
                         ? ranks_of_slurm_node(environment)
                         : number(environment, launcher.local_rank_count, kRanksMax);
  if (count && *count <= rank.value_or(0))
    refuse_launch(fmt::format(
        "the environment has {}={} and {}={}; ranks of a host count from 0, so this rank's number "
        "must be less than their count, {}",
        launcher.local_rank, rank.value_or(0), launcher.local_rank_count,
        environment(launcher.local_rank_count), *count));
  launch.local_rank = rank.value_or(0);
  launch.local_rank_count = count.value_or(1);
  launch.knows_local_ranks = rank && count;
}

std::optional<Launch> launch_by(const Launcher& launcher, const EnvironmentLookup& environment) {
  const auto rank = number(environment, launcher.rank, kRanksMax);
  const auto count = number(environment, launcher.rank_count, kRanksMax);
  if (!rank && !count) return std::nullopt;
  if (!rank || !count) {
    // Slurm gives a batch script its job's SLURM_PROCID.
    if (launcher.name == kSlurm) return std::nullopt;
    refuse_launch(
        fmt::format("the environment has {} but not {}; {} sets both, so set or unset both",
                    rank ? launcher.rank : launcher.rank_count,
                    rank ? launcher.rank_count : launcher.rank, launcher.name));
  }
  if (*rank >= *count)
    refuse_launch(
        fmt::format("the environment has {}={} and {}={}; ranks count from 0, so the first must "
                    "be less than the second",
                    launcher.rank, *rank, launcher.rank_count, *count));
  Launch launch;
  launch.launcher = launcher.name;
  launch.rank_variable = launcher.rank;
  launch.rank = *rank;
  launch.rank_count = *count;
  add_local_ranks(launcher, environment, launch);
  return launch;
}

void add_meeting_point(const EnvironmentLookup& environment, Launch& launch) {
  const char* const address = environment("MASTER_ADDR");
  const auto port = number(environment, "MASTER_PORT", 65535);
  if (address == nullptr || !port)
    refuse_launch(
        "torchrun's RANK and WORLD_SIZE are set, but not both of MASTER_ADDR and MASTER_PORT; "
        "start with torchrun, or unset them");
  launch.master_address = address;
  launch.master_port = static_cast<std::uint16_t>(*port);
}

// Below srun --mpi=pmi2, the variables of MPICH tell the rank, and only those of Slurm the host.
void add_knowledge(const Launch& from, Launch& to) {
  if (from.knows_local_ranks && !to.knows_local_ranks) {
    to.local_rank = from.local_rank;
    to.local_rank_count = from.local_rank_count;
    to.knows_local_ranks = true;
  }
  if (from.launcher == "torchrun") {
    to.master_address = from.master_address;
    to.master_port = from.master_port;
  }
}

bool are_equal(const Launch& a, const Launch& b) {
  return a.rank == b.rank && a.rank_count == b.rank_count;
}

// Whether `step` is one of Slurm, in which another launcher has started the ranks. Every process
// below a step has its variables: an interactive shell is one task, and mpirun or torchrun may be
// one task on each node. In a step of several tasks, ranks that are all on this host are a
// contradiction: each task would train a model of its own.
bool is_step_around(const Launch& step, const Launch& inner) {
  const bool are_all_here = inner.rank_count == 1 ||
                            (inner.knows_local_ranks && inner.local_rank_count == inner.rank_count);
  return step.launcher == kSlurm && (step.rank_count == 1 || !are_all_here);
}

}  // namespace

std::optional<Launch> find_launch(const EnvironmentLookup& environment) {
  std::optional<Launch> found;
  for (const Launcher& launcher : kLaunchers) {
    auto launch = launch_by(launcher, environment);
    if (!launch) continue;
    if (launch->launcher == "torchrun") add_meeting_point(environment, *launch);
    if (!found) {
      found = launch;
    } else if (are_equal(*launch, *found)) {
      add_knowledge(*launch, *found);
    } else if (is_step_around(*found, *launch)) {
      found = launch;
    } else if (!is_step_around(*launch, *found)) {
      refuse_launch(
          fmt::format("{} says that this is rank {} of {}, {} that it is rank {} of {}; start with "
                      "one of them, or unset the variables of the other",
                      found->launcher, found->rank, found->rank_count, launch->launcher,
                      launch->rank, launch->rank_count));
    }
  }
  return found;
}

}  // namespace sluice
