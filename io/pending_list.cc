#include "io/pending_list.h"

#include <algorithm>
#include <utility>

#include <sluice/error.h>

namespace sluice {

void PendingList::push(const Submission& submission) {
  IoRequest* request = submission.request;
  request->ticket = submission.ticket;
  request->next = nullptr;
  Level& level = levels_[static_cast<std::size_t>(request->priority)];
  if (level.first == nullptr) {
    level.first = request;
  } else {
    level.last->next = request;
  }
  level.last = request;
  ++count_;
}

Submission PendingList::pop() {
  SLUICE_CHECK(count_ != 0, "a request waits");
  const auto waits = [](const Level& level) { return level.first != nullptr; };
  auto chosen = std::ranges::find_if(levels_, [&](const Level& level) {
    return waits(level) && level.passed_over == kPassedOverMax;
  });
  if (chosen == levels_.end()) chosen = std::ranges::find_if(levels_, waits);
  for (auto level = chosen + 1; level != levels_.end(); ++level) {
    if (waits(*level) && level->passed_over < kPassedOverMax) ++level->passed_over;
  }
  chosen->passed_over = 0;
  IoRequest* request = std::exchange(chosen->first, chosen->first->next);
  --count_;
  return {request, request->ticket};
}

}  // namespace sluice
