// The first failure of a rank's collectives, shared by all its sequences: it is latched, passed to
// one handler, and fails every later operation.
//
// Thread rule: every function from any thread.
#pragma once

#include <functional>
#include <mutex>
#include <optional>

#include <sluice/error.h>

namespace sluice {

class RankFailure {
 public:
  // Keeps `error` if it is the first, and calls the handler.
  void set(const Error& error);
  bool is_set() const;
  void throw_if_set() const;
  // With an empty handler, the former one is not running when this returns.
  void on_failure(std::function<void(const Error&)> handler);

 private:
  mutable std::mutex mutex_;
  std::optional<Error> first_;                 // guarded by mutex_
  std::function<void(const Error&)> handler_;  // guarded by mutex_; must not call back here
};

}  // namespace sluice
