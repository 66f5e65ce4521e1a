// all_gather and reduce_scatter over MPI beside Open MPI's own calls, interleaved in one run:
//
//   OMPI_MPI_THREAD_LEVEL=3 mpirun -n 4 build/tests/bench/collectives_bench [ROUNDS [ROW]]
//
// With a ROW, every measurement is of so many operations one after the other, and Sluice's are
// waited for together, as a step enqueues them; the time is that of one.
// A size is that of the whole: what all_gather brings together, what reduce_scatter takes apart.
// The rivals are MPI_Allgather, MPI_Reduce_scatter_block, and MPI_Alltoall with the same sum in
// rank order. They are called from the main thread while Sluice's own is asleep, for which Open MPI
// has to allow several threads: OMPI_MPI_THREAD_LEVEL=3. Each time is the median over the rounds of
// the slowest rank's.
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/mpi_collectives.h"

namespace sluice {
namespace {

struct Contest {
  std::string name;
  std::function<void()> run;
  std::function<void()> finish = {};  // behind a row of run()
  std::vector<double> times_s = {};

  double median_s() const {
    std::vector<double> sorted = times_s;
    std::ranges::sort(sorted);
    return sorted[sorted.size() / 2];
  }
};

// Every contest in turn, round by round.
void compete(std::vector<Contest>& contests, int rounds, int row) {
  for (int round = -1; round < rounds; ++round) {
    for (Contest& contest : contests) {
      MPI_Barrier(MPI_COMM_WORLD);
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < row; ++i) contest.run();
      if (contest.finish) contest.finish();
      const std::chrono::duration<double> own = std::chrono::steady_clock::now() - begin;
      double time_s = own.count() / row;
      double slowest_s = 0;
      MPI_Allreduce(&time_s, &slowest_s, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      if (round >= 0) contest.times_s.push_back(slowest_s);  // the first touches memory
    }
  }
}

void print(std::uint32_t rank, const char* operation, std::uint64_t bytes,
           const std::vector<Contest>& contests) {
  if (rank != 0) return;
  double best_s = contests[1].median_s();
  for (std::size_t i = 2; i < contests.size(); ++i)
    best_s = std::min(best_s, contests[i].median_s());
  fmt::print("{:<15}{:>9}", operation, format_bytes(bytes));
  for (const Contest& contest : contests)
    fmt::print("  {} {:8.3f} ms", contest.name, contest.median_s() * 1e3);
  fmt::print("  {:.2f}x of the best rival\n", best_s / contests[0].median_s());
  std::fflush(stdout);
}

void run(int rounds, int row) {
  MpiWorld world({.timeout_s = 60, .sum = sum_in_order});
  const std::uint32_t ranks = world.rank_count();
  if (world.rank() == 0)
    fmt::print("{} ranks; rank 0 reads the memory of {} others\n", ranks, world.neighbor_count());
  {
    const auto device = make_host_device({.memory_bytes = 1_GiB});
    const auto collectives = world.join(*device);
    const Stream stream(*device, "bench");
    const auto await = [&] { device->synchronize(stream.id()); };
    for (std::uint64_t bytes = 64_KiB; bytes <= 64_MiB; bytes *= 4) {
      const std::uint64_t shard_bytes = bytes / ranks / 256 * 256;
      const std::uint64_t count = shard_bytes / sizeof(float);
      DeviceBuffer whole(*device, shard_bytes * ranks, "bench");
      DeviceBuffer exchanged(*device, shard_bytes * ranks, "bench");
      DeviceBuffer shard(*device, shard_bytes, "bench");
      std::vector<const void*> sources;
      for (std::uint32_t i = 0; i < ranks; ++i)
        sources.push_back(exchanged.data() + i * shard_bytes);
      std::vector<Contest> gathers;
      gathers.push_back({"sluice",
                         [&] {
                           collectives->all_gather({.target = whole.data(),
                                                    .source = shard.data(),
                                                    .shard_bytes = shard_bytes,
                                                    .subject = "bench"},
                                                   stream.id());
                         },
                         await});
      gathers.push_back({"MPI_Allgather", [&] {
                           MPI_Allgather(shard.data(), static_cast<int>(shard_bytes), MPI_BYTE,
                                         whole.data(), static_cast<int>(shard_bytes), MPI_BYTE,
                                         MPI_COMM_WORLD);
                         }});
      compete(gathers, rounds, row);
      print(world.rank(), "all_gather", bytes, gathers);
      std::vector<Contest> reductions;
      reductions.push_back({"sluice",
                            [&] {
                              collectives->reduce_scatter({.target = shard.data(),
                                                           .source = whole.data(),
                                                           .shard_elements = count,
                                                           .subject = "bench"},
                                                          stream.id());
                            },
                            await});
      reductions.push_back({"MPI_Reduce_scatter_block", [&] {
                              MPI_Reduce_scatter_block(whole.data(), shard.data(),
                                                       static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                                                       MPI_COMM_WORLD);
                            }});
      reductions.push_back(
          {"MPI_Alltoall + sum", [&] {
             MPI_Alltoall(whole.data(), static_cast<int>(shard_bytes), MPI_BYTE, exchanged.data(),
                          static_cast<int>(shard_bytes), MPI_BYTE, MPI_COMM_WORLD);
             sum_in_order({.target = shard.data(), .sources = sources, .element_count = count});
           }});
      compete(reductions, rounds, row);
      print(world.rank(), "reduce_scatter", bytes, reductions);
    }
  }
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  const char* const level = std::getenv("OMPI_MPI_THREAD_LEVEL");
  if (level == nullptr || std::string_view(level) != "3") {
    std::fprintf(stderr, "set OMPI_MPI_THREAD_LEVEL=3: two threads call MPI in turn\n");
    return 2;
  }
  sluice::run(argc > 1 ? std::atoi(argv[1]) : 21, argc > 2 ? std::atoi(argv[2]) : 1);
  return 0;
}
