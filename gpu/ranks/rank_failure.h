// The first failure of a rank's collectives, shared by all sequences of the rank. The failure is
// latched and passed to one handler. Every later operation fails with the same error.
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
  // Keeps `error` and calls the handler, if no error was set before.
  void set(const Error& error);
  bool is_set() const;
  void throw_if_set() const;
  // When on_failure() returns, the former handler is not running.
  void on_failure(std::function<void(const Error&)> handler);

 private:
  mutable std::mutex mutex_;
  std::optional<Error> first_;                 // guarded by mutex_
  std::function<void(const Error&)> handler_;  // guarded by mutex_; must not call this object
};

}  // namespace sluice
