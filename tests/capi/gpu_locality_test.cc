// Ranks on GPUs through the C interface keep to the processors near their GPUs, as the command's
// ranks do. The stand-in's GPU has the address of a device of this machine, whose processors the
// kernel tells.
#include <gtest/gtest.h>

#include <sched.h>
#include <sys/types.h>

#include <algorithm>
#include <barrier>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "capi/sluice_gpu.h"
#include "tests/capi/capi_support.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"

namespace sluice::test {
namespace {

using Processors = std::set<int>;

Processors processors_of(pid_t thread) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  Processors all;
  if (::sched_getaffinity(thread, sizeof allowed, &allowed) != 0) return all;
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(i, &allowed)) all.insert(i);
  return all;
}

void bind_this_thread(int processor) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(processor, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
}

// The list of the kernel's, such as "0-3,8", as far as this process may use its processors.
Processors usable(std::string_view list) {
  Processors listed;
  while (!list.empty()) {
    const std::string_view part = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), part.size() + 1));
    int first = 0;
    const auto read = std::from_chars(part.data(), part.data() + part.size(), first);
    if (read.ec != std::errc()) break;
    int last = first;
    if (*read.ptr == '-') (void)std::from_chars(read.ptr + 1, part.data() + part.size(), last);
    for (int i = first; i <= last; ++i) listed.insert(i);
  }
  const Processors allowed = processors_of(0);
  std::erase_if(listed, [&](int processor) { return !allowed.contains(processor); });
  return listed;
}

// A device of this machine with at least two processors near it.
struct Neighbor {
  std::string address;
  Processors processors;
};
Neighbor find_neighbor() {
  std::error_code absent;
  for (const auto& device : std::filesystem::directory_iterator("/sys/bus/pci/devices", absent)) {
    std::string list;
    std::getline(std::ifstream(device.path() / "local_cpulist"), list);
    if (Processors near = usable(list); near.size() > 1)
      return {device.path().filename(), std::move(near)};
  }
  return {};
}

// The threads that Sluice has started, with their processors.
std::map<pid_t, Processors> own_threads() {
  std::map<pid_t, Processors> all;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    const auto thread = static_cast<pid_t>(std::stoi(task.path().filename().string()));
    if (name.starts_with("sluice-")) all.emplace(thread, processors_of(thread));
  }
  return all;
}

void set_launcher(const char* ranks, const char* ranks_of_host) {
  for (const auto& [name, value] : {std::pair{"RANK", "0"},
                                    {"WORLD_SIZE", ranks},
                                    {"LOCAL_RANK", "0"},
                                    {"LOCAL_WORLD_SIZE", ranks_of_host},
                                    {"MASTER_ADDR", "localhost"},
                                    {"MASTER_PORT", "29500"}})
    ::setenv(name, value, 1);
}

// Makes the engines of two ranks on threads that are bound to one processor. Returns the processors
// of the threads that the engines have started.
std::set<Processors> processors_of_two_ranks(int bound_to) {
  const char* made_id = nullptr;
  EXPECT_EQ(sluice_gpu_ranks_id(&made_id), SLUICE_OK) << sluice_last_error();
  const std::string id = made_id;
  const std::map<pid_t, Processors> before = own_threads();
  std::barrier<> together(3);
  const auto run = [&](std::uint32_t rank) {
    bind_this_thread(bound_to);
    struct Rank : CApiEngine {
      sluice_status create(const char* of_world, std::uint32_t number) {
        const sluice_gpu_ranks ranks{of_world, number, 2};
        const sluice_model described = model();
        return sluice_engine_create_on_gpu(config().c_str(), &described, 0, &ranks, &engine_);
      }
    } made;
    EXPECT_EQ(made.create(id.c_str(), rank), SLUICE_OK) << sluice_last_error();
    together.arrive_and_wait();
    together.arrive_and_wait();
  };
  std::thread first(run, 0u);
  std::thread second(run, 1u);
  together.arrive_and_wait();
  std::set<Processors> all;
  for (const auto& [thread, processors] : own_threads())
    if (!before.contains(thread)) all.insert(processors);
  all.erase(Processors());  // of a thread that has ended meanwhile
  together.arrive_and_wait();
  first.join();
  second.join();
  return all;
}

// In a process of its own, since the choice is for good. Returns the number of the first
// expectation that fails.
int check_ranks(const Neighbor& gpu) {
  set_fake_cuda_pci_address(gpu.address);
  const int bound_to = *gpu.processors.begin();
  const Processors one{bound_to};
  // Threads inherit the processor of the one that starts them, unless they are bound to others.
  const auto inherit = [&] { return processors_of_two_ranks(bound_to).contains(one); };
  if (!inherit()) return 1;  // no launcher
  set_launcher("2", "1");
  if (!inherit()) return 2;  // each alone on its host
  set_launcher("1", "2");
  if (!inherit()) return 3;  // fewer processes than ranks
  set_launcher("2", "2");
  ::unsetenv("MASTER_ADDR");
  if (!inherit()) return 4;  // no launcher's environment
  set_launcher("2", "2");
  const std::set<Processors> near = processors_of_two_ranks(bound_to);
  if (near.empty() || near.contains(one)) return 5;
  return std::ranges::all_of(
             near,
             [&](const Processors& some) { return std::ranges::includes(gpu.processors, some); })
             ? 0
             : 6;
}

TEST(CApiGpuLocality, OneOfSeveralRanksOfAHostStaysNearItsGpu) {
  const Neighbor gpu = find_neighbor();
  if (gpu.address.empty())
    GTEST_SKIP() << "the kernel tells of no PCI device with two processors of this process near it";
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(std::_Exit(check_ranks(gpu)), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace sluice::test
