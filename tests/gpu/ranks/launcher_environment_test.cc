// Environments of launchers, alone, together and in contradiction.
#include "gpu/ranks/launcher_environment.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/support/expect_error.h"

namespace sluice {
namespace {

using Variables = std::map<std::string, std::string>;

std::optional<Launch> launch_in(const Variables& variables) {
  return find_launch([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

void expect_error_naming(std::initializer_list<std::string_view> names,
                         const std::function<void()>& body) {
  const std::string message = test::expect_error(ErrorCode::kConfig, body);
  for (const std::string_view name : names)
    EXPECT_NE(message.find(name), std::string::npos) << name << " in: " << message;
}

const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "5"},
                            {"OMPI_COMM_WORLD_SIZE", "8"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Variables kTorchrun = {{"RANK", "5"},          {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},    {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "n17"}, {"MASTER_PORT", "29500"}};
const Variables kSlurm = {
    {"SLURM_PROCID", "5"}, {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_LOCALID", "1"}};

Variables merged(Variables a, const Variables& b) {
  for (const auto& [name, value] : b) a[name] = value;
  return a;
}

TEST(Launch, EmptyEnvironmentIsOneRank) {
  EXPECT_FALSE(launch_in({}).has_value());
}

TEST(Launch, EveryLauncherIsUnderstood) {
  const Variables mpich = {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}, {"MPI_LOCALRANKID", "1"}};
  for (const auto& [variables, name] : {std::pair{kOpenMpi, "Open MPI"},
                                        {mpich, "MPICH"},
                                        {kSlurm, "Slurm"},
                                        {kTorchrun, "torchrun"}}) {
    const auto launch = launch_in(variables);
    ASSERT_TRUE(launch.has_value()) << name;
    EXPECT_EQ(launch->launcher, name);
    EXPECT_EQ(launch->rank, 5u);
    EXPECT_EQ(launch->rank_count, 8u);
    EXPECT_EQ(launch->local_rank, 1u);
  }
  EXPECT_EQ(launch_in(kOpenMpi)->local_rank_count, 4u);
  EXPECT_TRUE(launch_in(kOpenMpi)->knows_local_ranks);
  EXPECT_EQ(launch_in(kTorchrun)->master_address, "n17");
  EXPECT_EQ(launch_in(kTorchrun)->master_port, 29500);
  EXPECT_EQ(launch_in(kSlurm)->rank_variable, "SLURM_PROCID");
}

TEST(Launch, LaunchersThatAgreeAreOne) {
  const auto launch = launch_in(merged(merged(kOpenMpi, kSlurm), kTorchrun));
  ASSERT_TRUE(launch.has_value());
  EXPECT_EQ(launch->launcher, "Open MPI");
  EXPECT_EQ(launch->master_port, 29500);
  EXPECT_EQ(launch_in(merged(kSlurm, kTorchrun))->launcher, "Slurm");  // MPI connects them
}

// As srun --mpi=pmi2 starts ranks.
TEST(Launch, TheNumbersOfAHostAreTakenFromTheLauncherThatKnowsThem) {
  const Variables pmi = {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}};
  const Variables lists = {{"SLURM_STEP_TASKS_PER_NODE", "4(x2)"}, {"SLURM_NODEID", "1"}};
  for (const Variables& known : {merged(kSlurm, lists), kTorchrun}) {
    const auto launch = launch_in(merged(pmi, known));
    EXPECT_EQ(launch->launcher, "MPICH");
    EXPECT_EQ(launch->local_rank, 1u);
    EXPECT_EQ(launch->local_rank_count, 4u);
    EXPECT_TRUE(launch->knows_local_ranks);
  }
  EXPECT_FALSE(launch_in(merged(pmi, kSlurm))->knows_local_ranks);
}

TEST(Launch, LaunchersThatDisagreeAreBothNamed) {
  Variables variables = merged(kOpenMpi, kTorchrun);
  variables["RANK"] = "4";
  expect_error_naming({"Open MPI says that this is rank 5 of 8", "torchrun that it is rank 4 of 8"},
                      [&] { (void)launch_in(variables); });
  variables["RANK"] = "5";
  variables["WORLD_SIZE"] = "6";
  expect_error_naming({"Open MPI", "torchrun", "of 6"}, [&] { (void)launch_in(variables); });
}

// An interactive shell is a step of one task. So are the daemons that mpirun starts on other nodes,
// and torchrun, one task on each node.
TEST(Launch, AStepOfSlurmAroundAnotherLauncherSaysNothing) {
  const Variables shell = {
      {"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_LOCALID", "0"}};
  const Variables node = {{"SLURM_PROCID", "1"},
                          {"SLURM_STEP_NUM_TASKS", "2"},
                          {"SLURM_LOCALID", "0"},
                          {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                          {"SLURM_NODEID", "1"}};
  for (const Variables& step : {shell, node}) {
    for (const auto& [variables, name] :
         {std::pair{kOpenMpi, "Open MPI"}, {kTorchrun, "torchrun"}}) {
      const auto launch = launch_in(merged(variables, step));
      EXPECT_EQ(launch->launcher, name);
      EXPECT_EQ(launch->rank, 5u);
      EXPECT_EQ(launch->rank_count, 8u);
      EXPECT_EQ(launch->local_rank, 1u);
      EXPECT_EQ(launch->local_rank_count, 4u);
    }
  }
  EXPECT_EQ(launch_in(merged(shell, {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}}))->local_rank_count, 1u);
}

// Images may have torchrun's variables of one rank. Every task would train a model of its own.
TEST(Launch, OneRankInAStepOfSeveralIsRefused) {
  Variables alone = kTorchrun;
  for (const char* name : {"RANK", "LOCAL_RANK"}) alone[name] = "0";
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) alone[name] = "1";
  expect_error_naming({"Slurm says that this is rank 5 of 8", "torchrun that it is rank 0 of 1"},
                      [&] { (void)launch_in(merged(alone, kSlurm)); });
}

// As srun -n 8 torchrun --nproc-per-node 2, without --nnodes.
TEST(Launch, SeveralRanksOfOneHostInAStepOfSeveralAreRefused) {
  for (const auto& [launcher, name] : {std::pair{kTorchrun, "torchrun"}, {kOpenMpi, "Open MPI"}}) {
    Variables here = launcher;
    for (auto& [variable, value] : here) {
      if (variable.ends_with("RANK")) value = "0";
      if (variable.ends_with("SIZE")) value = "2";
    }
    expect_error_naming({"Slurm", "rank 5 of 8", "rank 0 of 2", name},
                        [&] { (void)launch_in(merged(here, kSlurm)); });
  }
}

// A shell in an allocation has Slurm's variables of the job.
TEST(Launch, AllocationWithoutStepIsNoLaunch) {
  EXPECT_FALSE(launch_in({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}).has_value());
}

TEST(Launch, BrokenVariablesAreNamed) {
  for (const auto& [name, value] : {std::pair{"RANK", "one"},
                                    {"RANK", "-1"},
                                    {"RANK", ""},
                                    {"WORLD_SIZE", "8x"},
                                    {"MASTER_PORT", "70000"}}) {
    Variables variables = kTorchrun;
    variables[name] = value;
    expect_error_naming({name}, [&] { (void)launch_in(variables); });
  }
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    Variables variables = kTorchrun;
    variables.erase(name);
    expect_error_naming({name}, [&] { (void)launch_in(variables); });
  }
  Variables beyond = kTorchrun;
  beyond["RANK"] = "8";
  expect_error_naming({"RANK=8", "WORLD_SIZE=8"}, [&] { (void)launch_in(beyond); });
}

// Slurm lists the ranks of every node, in the order of the nodes.
TEST(Launch, SlurmTellsHowManyRanksANodeHas) {
  const auto count_on = [](const char* list, const char* node) {
    const auto launch =
        launch_in(merged(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", list}, {"SLURM_NODEID", node}}));
    return launch->knows_local_ranks ? launch->local_rank_count : 0;
  };
  EXPECT_EQ(count_on("4(x2),3", "0"), 4u);
  EXPECT_EQ(count_on("4(x2),3", "1"), 4u);
  EXPECT_EQ(count_on("4(x2),3", "2"), 3u);
  EXPECT_EQ(count_on("4(x2),3", "3"), 0u);
  EXPECT_EQ(count_on("5,4(x2),2", "2"), 4u);
  EXPECT_EQ(count_on("8", "0"), 8u);
  for (const char* list : {"", "4(", "4(x2", "4(x)", "4(y2)", "4,", ",4", "4;3", "x", "4(x2)3"}) {
    expect_error_naming({"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"},
                        [&] { (void)count_on(list, "0"); });
  }
}

// Every rank of a host then counts alike, whatever its own number.
TEST(Launch, AHostOfUnknownSizeCountsAsOneRank) {
  const auto launch = launch_in(kSlurm);
  EXPECT_EQ(launch->local_rank, 1u);
  EXPECT_EQ(launch->local_rank_count, 1u);
  EXPECT_FALSE(launch->knows_local_ranks);
}

TEST(Launch, NumbersOfAHostThatCannotBeAreRefused) {
  Variables variables = kTorchrun;
  variables["LOCAL_WORLD_SIZE"] = "0";
  expect_error_naming({"LOCAL_RANK=1", "LOCAL_WORLD_SIZE=0"}, [&] { (void)launch_in(variables); });
  variables["LOCAL_WORLD_SIZE"] = "1";
  expect_error_naming({"LOCAL_RANK=1", "LOCAL_WORLD_SIZE=1"}, [&] { (void)launch_in(variables); });
  variables.erase("LOCAL_RANK");
  variables["LOCAL_WORLD_SIZE"] = "0";
  expect_error_naming({"LOCAL_WORLD_SIZE=0"}, [&] { (void)launch_in(variables); });
  expect_error_naming({"SLURM_LOCALID=1", "SLURM_STEP_TASKS_PER_NODE"}, [&] {
    (void)launch_in(
        merged(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "1(x8)"}, {"SLURM_NODEID", "0"}}));
  });
}

}  // namespace
}  // namespace sluice
