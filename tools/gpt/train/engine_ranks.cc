#include "tools/gpt/train/engine_ranks.h"

#include <chrono>
#include <exception>
#include <future>
#include <numeric>
#include <system_error>
#include <vector>

namespace sluice {
namespace {

// How often rank 0 says that it is at work; a fraction of the least sharding.timeout.
constexpr std::chrono::milliseconds kAtWorkPeriod{50};

void tell_until(const std::future<void>& ended, Engine& engine) {
  for (bool is_over = false; !is_over;) {
    is_over = ended.wait_for(kAtWorkPeriod) == std::future_status::ready;
    (void)engine.exchange(is_over ? 1 : 0);
  }
}

}  // namespace

double mean_over_ranks(Engine& engine, double own) {
  const std::vector<double> values = engine.exchange(own);
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

bool all_ranks(Engine& engine, FirstFailure& failures, const std::function<void()>& work) {
  return mean_over_ranks(engine, failures.attempt(work) ? 0 : 1) == 0;
}

void await_first_rank(Engine& engine, const std::function<void()>& work) {
  if (engine.rank_count() == 1) return work();
  if (engine.rank() != 0) {
    while (engine.exchange(0).front() == 0) continue;
    return;
  }
  std::promise<void> end;
  const std::future<void> ended = end.get_future();
  const auto tell = [&] { tell_until(ended, engine); };
  std::future<void> others;
  try {
    others = std::async(std::launch::async, tell);
  } catch (const std::system_error&) {
    // No thread can be had. The others hear of this rank when its work has ended.
    others = std::async(std::launch::deferred, tell);
  }
  std::exception_ptr failure;
  try {
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  end.set_value();
  try {
    others.get();
  } catch (const std::exception&) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace sluice
