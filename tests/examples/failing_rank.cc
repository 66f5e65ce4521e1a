// The main.cc of an example, with ranks that fail on demand: if the environment has FAILING_LAUNCH,
// rank 1 throws in place of its launch of that number, and rank 0 never comes to the one before.
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string_view>
#include <thread>

#include <sluice/host_device.h>

namespace {

int launches = 0;

void count_launch() {
  using std::literals::operator""sv;
  const char* const failing = std::getenv("FAILING_LAUNCH");
  const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (failing == nullptr || rank == nullptr) return;
  const int left = std::atoi(failing) - ++launches;
  if (left == 0 && rank == "1"sv) throw std::runtime_error("this rank has no more to give");
  while (left == 1 && rank == "0"sv) std::this_thread::sleep_for(std::chrono::seconds(1));
}

}  // namespace

#define launch(stream, ...) launch((count_launch(), stream), __VA_ARGS__)
#include "main.cc"
