// The part of Ranks that runs work on all ranks, and tells all ranks of a failure.
#include <array>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <future>
#include <mutex>
#include <optional>
#include <system_error>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/ranks/ranks.h"

namespace sluice {
namespace {

// How often ranks say that they are still at work; a fraction of the least sharding.timeout.
constexpr std::chrono::milliseconds kExchangePeriod{50};

}  // namespace

void Ranks::together_for_long(std::string_view subject, const std::function<void()>& body) {
  if (!are_several()) return together(subject, body);
  std::mutex mutex;
  std::condition_variable changed;
  bool is_over = false;
  const auto exchange = [&] {
    for (RankRange over(0); over.least == 0;) {
      {
        std::unique_lock lock(mutex);
        changed.wait_for(lock, kExchangePeriod, [&] { return is_over; });
        over = RankRange(is_over ? 1 : 0);
      }
      all_reduce({}, std::span(&over, 1), subject);
    }
  };
  std::future<void> others;
  try {
    others = std::async(std::launch::async, exchange);
  } catch (const std::system_error&) {
    // No thread can be had. The others hear of this rank when its work has ended.
    others = std::async(std::launch::deferred, exchange);
  }
  std::exception_ptr failure;
  try {
    body();
  } catch (...) {
    failure = std::current_exception();
  }
  {
    const std::scoped_lock lock(mutex);
    is_over = true;
  }
  changed.notify_all();
  try {
    others.get();
  } catch (const std::exception&) {
    if (failure) std::rethrow_exception(failure);
    throw;
  }
  together(subject, [&] {
    if (failure) std::rethrow_exception(failure);
  });
}

void Ranks::share_failure(const std::optional<Error>& own, std::string_view subject) {
  RankRange worst(own ? 1 + static_cast<std::uint64_t>(own->code()) : 0);
  try {
    all_reduce({}, std::span(&worst, 1), subject);
  } catch (const Error&) {
    if (!own) throw;  // otherwise the others know already, and some may have left by now
  }
  if (own) throw *own;
  if (worst.most != 0)
    throw Error(static_cast<ErrorCode>(worst.most - 1),
                fmt::format("{}: another rank has failed, and says why", subject));
}

}  // namespace sluice
