#include "base/at_once.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <vector>

#include "base/topology.h"

namespace sluice {

void for_each_at_once(std::size_t count, const std::function<void(std::size_t)>& run) {
  std::atomic<std::size_t> next = 0;
  std::vector<std::future<void>> workers;
  for (std::size_t i = 0; i < std::min<std::size_t>(count, granted_threads(0)); ++i)
    workers.push_back(std::async(std::launch::async, [&] {
      for (std::size_t at = next++; at < count; at = next++) run(at);
    }));
  for (std::future<void>& worker : workers) worker.get();
}

}  // namespace sluice
