// The first failure of a rank's collectives. All sequences of the rank share this failure. The
// failure is latched and passed to one handler. Every later operation fails with the same error.
//
// Thread rule: any thread may call every function.
#pragma once

#include <functional>
#include <mutex>
#include <optional>

#include <sluice/error.h>

namespace sluice {

class RankFailure {
 public:
  // If no error was set before, the call keeps `error` and calls the handler.
  void set(const Error& error);
  bool is_set() const;
  void throw_if_set() const;
  // After on_failure() has returned, the former handler no longer runs.
  void on_failure(std::function<void(const Error&)> handler);

 private:
  mutable std::mutex mutex_;
  std::optional<Error> first_;                 // guarded by mutex_
  std::function<void(const Error&)> handler_;  // guarded by mutex_; must not call this object
};

}  // namespace sluice
