// This queue returns items in the order of their ranks, and the lowest rank comes first. Most items
// with the same urgency also arrive in the order of their ranks. The queue keeps these items in one
// line for each urgency. Only the other items are sorted.
//
// Thread rule: one thread.
// Invariant: the items of each line are in the order of their ranks.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace sluice {

// The unique rank of an item is `job.rank`. The upper 8 bits of the rank are the urgency.
template <typename Item>
class RankedQueue {
 public:
  bool empty() const { return count_ == 0; }

  void push(const Item& item) {
    ++count_;
    std::deque<Item>& line = lines_[item.job.rank >> 56];
    if (line.empty() || line.back().job.rank < item.job.rank) return line.push_back(item);
    others_.push_back(item);
    std::push_heap(others_.begin(), others_.end(), is_after);
  }

  // Requires: the queue is not empty.
  Item pop() {
    --count_;
    std::deque<Item>* first = nullptr;
    for (std::deque<Item>& line : lines_) {
      if (line.empty()) continue;
      first = &line;  // the others are of lower urgency
      break;
    }
    if (first == nullptr || (!others_.empty() && is_after(first->front(), others_.front()))) {
      std::pop_heap(others_.begin(), others_.end(), is_after);
      const Item item = others_.back();
      others_.pop_back();
      return item;
    }
    const Item item = first->front();
    first->pop_front();
    return item;
  }

  // Calls `visit` with each item, in the order in which the items would leave the queue.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    std::vector<Item> items = others_;
    for (const std::deque<Item>& line : lines_) items.insert(items.end(), line.begin(), line.end());
    std::sort(items.begin(), items.end(),
              [](const Item& one, const Item& other) { return is_after(other, one); });
    std::for_each(items.begin(), items.end(), visit);
  }

 private:
  static constexpr std::size_t kUrgencies = 4;
  static bool is_after(const Item& one, const Item& other) { return one.job.rank > other.job.rank; }

  std::array<std::deque<Item>, kUrgencies> lines_;
  std::vector<Item> others_;  // a heap
  std::size_t count_ = 0;
};

}  // namespace sluice
