#include "gpu/ranks/local_collectives.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>
#include "gpu/ranks/integer_reduction.h"

namespace sluice {
namespace {

// A rank's contribution to a meeting: its own view of the operation.
struct Part {
  std::string_view kind;
  std::string_view subject;
  std::uint64_t size = 0;  // bytes or elements, depending on the kind; equal on all ranks
  const std::byte* source = nullptr;
};

// The group's name (its first rank and which open() made it) and the number of the operation.
using MeetingKey = std::tuple<std::uint64_t, std::uint32_t, std::uint64_t>;

constexpr std::uint32_t kPhases = 3;  // arrived, half done (all_reduce), done

struct Meeting {
  std::vector<std::optional<Part>> parts;  // by rank of the group
  std::array<std::uint32_t, kPhases> counts{};
  std::uint32_t left = 0;
};

std::string describe(const Part& part) {
  return fmt::format("{} of \"{}\"", part.kind, part.subject);
}

}  // namespace

class LocalWorld::Meetings {
 public:
  explicit Meetings(const HostCollectivesOptions& options) : options_(options) {}

  SumFunction sum() const { return options_.sum; }

  // Blocks until every rank of `group` has come. The parts stay readable until leave().
  const std::vector<std::optional<Part>>& arrive(const MeetingKey& key, const Part& part,
                                                 std::uint32_t rank,
                                                 std::span<const std::uint32_t> group) {
    std::unique_lock lock(mutex_);
    throw_if_failed(lock);
    Meeting& meeting = meetings_[key];
    meeting.parts.resize(group.size());
    meeting.parts[rank] = part;
    wait_for_all(lock, meeting, /*phase=*/0, part, group);
    for (std::size_t i = 0; i < group.size(); ++i) {
      const Part& other = *meeting.parts[i];
      if (other.kind == part.kind && other.size == part.size) continue;
      fail(lock, fmt::format("rank {} runs {} with {}, but rank {} runs {} with {}: the ranks "
                             "disagree about the sequence; start all with one config and model",
                             group[i], describe(other), other.size, group[rank], describe(part),
                             part.size));
    }
    ++working_;
    return meeting.parts;
  }

  // Blocks until every rank has finished everything before `phase`.
  void pass(const MeetingKey& key, std::uint32_t phase, const Part& part,
            std::span<const std::uint32_t> group) {
    std::unique_lock lock(mutex_);
    --working_;
    changed_.notify_all();
    Meeting& meeting = meetings_[key];
    wait_for_all(lock, meeting, phase, part, group);
    if (phase + 1 < kPhases) {
      ++working_;
    } else if (++meeting.left == group.size()) {
      meetings_.erase(key);
    }
  }

  void abort(const std::string& message) {
    const std::scoped_lock lock(mutex_);
    if (!failure_) failure_ = message;
    changed_.notify_all();
  }

  // A rank that has come goes on only to end. It no longer reads others' memory.
  void give_up(const Part& part, std::uint32_t rank, const char* why) {
    std::unique_lock lock(mutex_);
    --working_;
    changed_.notify_all();
    if (!failure_)
      failure_ = fmt::format("rank {} has failed in {}: {}", rank, describe(part), why);
    changed_.wait(lock, [this] { return working_ == 0; });
  }

  // `rank` comes to no further meeting. Ranks that wait for it need not wait for the timeout.
  void leave(std::uint32_t rank) {
    const std::scoped_lock lock(mutex_);
    left_.insert(rank);
    changed_.notify_all();
  }

 private:
  void wait_for_all(std::unique_lock<std::mutex>& lock, Meeting& meeting, std::uint32_t phase,
                    const Part& part, std::span<const std::uint32_t> group) {
    std::uint32_t& count = meeting.counts[phase];
    if (++count == group.size()) changed_.notify_all();
    // A rank that comes to the first phase goes through all of them before it leaves.
    const auto left = [&]() -> std::optional<std::uint32_t> {
      for (std::size_t i = 0; i < group.size(); ++i)
        if (!meeting.parts[i] && left_.contains(group[i])) return group[i];
      return std::nullopt;
    };
    const bool came =
        changed_.wait_for(lock, std::chrono::duration<double>(options_.timeout_s),
                          [&] { return count == group.size() || failure_ || left(); });
    // Behind the last phase no rank needs another's memory: a rank that has failed since then
    // has failed in something else.
    if (count == group.size() && phase + 1 == kPhases) return;
    throw_if_failed(lock);
    if (count == group.size()) return;
    if (came)
      fail(lock,
           fmt::format("rank {} has ended, but others wait for it in {}", *left(), describe(part)));
    fail(lock, fmt::format("rank {} has not reached {} within {} s; it may be stopped; if it is "
                           "only late, raise sharding.timeout",
                           group[first_missing(meeting)], describe(part), options_.timeout_s));
  }

  // In the phases behind the first one, the first rank stands for whichever is late.
  static std::size_t first_missing(const Meeting& meeting) {
    const auto missing = std::find(meeting.parts.begin(), meeting.parts.end(), std::nullopt);
    return missing == meeting.parts.end() ? 0 : missing - meeting.parts.begin();
  }

  [[noreturn]] void fail(std::unique_lock<std::mutex>& lock, const std::string& message) {
    if (!failure_) failure_ = message;
    changed_.notify_all();
    throw_if_failed(lock);
    SLUICE_CHECK(false, "a failure was set");
  }

  // A rank that leaves takes its memory along, so no other rank may be reading it then.
  void throw_if_failed(std::unique_lock<std::mutex>& lock) {
    if (!failure_) return;
    changed_.wait(lock, [this] { return working_ == 0; });
    throw Error(ErrorCode::kRanks, *failure_);
  }

  const HostCollectivesOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;

  // Guarded by mutex_.
  std::map<MeetingKey, Meeting> meetings_;
  std::uint32_t working_ = 0;     // ranks that are reading others' memory now
  std::set<std::uint32_t> left_;  // ranks that have ended
  std::optional<std::string> failure_;
};

namespace {

// One rank's part of the world. It ends with the last of the rank's collectives.
struct Membership {
  Membership(std::shared_ptr<LocalWorld::Meetings> of, std::uint32_t number)
      : meetings(std::move(of)), rank(number) {}
  ~Membership() { meetings->leave(rank); }
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  const std::shared_ptr<LocalWorld::Meetings> meetings;
  const std::uint32_t rank;
  std::uint64_t opened = 0;  // collectives so far
};

class LocalCollectives final : public HostCollectives {
 public:
  LocalCollectives(std::shared_ptr<Membership> membership, HostDevice& device,
                   std::shared_ptr<RankFailure> failure, RankGroup group)
      : HostCollectives(device, std::move(failure), std::move(group)),
        membership_(std::move(membership)),
        meetings_(*membership_->meetings),
        sequence_name_(membership_->opened++) {}

  std::string_view name() const override { return "local"; }

  // The ranks may have opened unequal numbers on other objects.
  std::unique_ptr<Collectives> open(std::span<const std::uint32_t> ranks) override {
    membership_->opened = agree_on_maximum(membership_->opened, "the opening of collectives");
    return std::make_unique<LocalCollectives>(membership_, device(), failure(),
                                              group().subgroup(ranks));
  }

  void abort(std::string_view reason) noexcept override {
    meetings_.abort(fmt::format("rank {} has given up: {}", group().members[rank()], reason));
  }

 private:
  using Parts = std::vector<std::optional<Part>>;

  // `work` reads the parts; `second`, if any, runs when all have done their work.
  template <class Work, class Second>
  void meet(const Part& part, std::uint64_t sequence, const Work& work, const Second& second) {
    const MeetingKey key{sequence_name_, group().members.front(), sequence};
    const Parts& parts = meetings_.arrive(key, part, rank(), group().members);
    attempt(part, [&] { work(parts); });
    meetings_.pass(key, 1, part, group().members);
    attempt(part, [&] { second(parts); });
    meetings_.pass(key, 2, part, group().members);
  }
  template <class Work>
  void attempt(const Part& part, const Work& work) {
    try {
      work();
    } catch (const std::exception& error) {
      meetings_.give_up(part, group().members[rank()], error.what());
      throw;
    }
  }
  template <class Work>
  void meet(const Part& part, std::uint64_t sequence, const Work& work) {
    meet(part, sequence, work, [](const Parts&) {});
  }

  void sum(const Parts& parts, std::uint64_t begin_bytes, OrderedSum sum) const {
    std::vector<const void*> sources;
    for (const auto& part : parts) sources.push_back(part->source + begin_bytes);
    sum.sources = sources;
    meetings_.sum()(sum);
  }

  void run(const AllGather& gather, std::uint64_t sequence) override {
    const Part part{"all_gather", gather.subject, gather.shard_bytes, gather.source};
    meet(part, sequence, [&](const Parts& parts) {
      for (std::uint32_t i = 0; i < rank_count(); ++i) {
        std::byte* const target = gather.target + i * gather.shard_bytes;
        if (parts[i]->source != target && gather.shard_bytes != 0)
          std::memcpy(target, parts[i]->source, gather.shard_bytes);
      }
    });
  }

  void run(const ReduceScatter& reduce, std::uint64_t sequence) override {
    const Part part{"reduce_scatter", reduce.subject, reduce.shard_elements, reduce.source};
    meet(part, sequence, [&](const Parts& parts) {
      sum(parts, rank() * reduce.shard_elements * size_of(reduce.source_type),
          {.target = reduce.target,
           .target_type = reduce.target_type,
           .source_type = reduce.source_type,
           .element_count = reduce.shard_elements});
    });
  }

  // Each rank adds its share in place, then copies the other shares from their ranks.
  void run(const AllReduce& reduce, std::uint64_t sequence) override {
    const Part part{"all_reduce", reduce.subject, reduce.element_count, reduce.data};
    const std::uint64_t share = div_ceil(reduce.element_count, rank_count());
    const auto begin = [&](std::uint32_t i) { return std::min(i * share, reduce.element_count); };
    const std::uint64_t element_bytes = size_of(reduce.type);
    meet(
        part, sequence,
        [&](const Parts& parts) {
          const std::uint64_t begin_bytes = begin(rank()) * element_bytes;
          sum(parts, begin_bytes,
              {.target = reduce.data + begin_bytes,
               .target_type = reduce.type,
               .source_type = reduce.type,
               .element_count = begin(rank() + 1) - begin(rank())});
        },
        [&](const Parts& parts) {
          for (std::uint32_t i = 0; i < rank_count(); ++i) {
            const std::uint64_t at = begin(i) * element_bytes;
            if (i != rank() && begin(i + 1) != begin(i))
              std::memcpy(reduce.data + at, parts[i]->source + at,
                          (begin(i + 1) - begin(i)) * element_bytes);
          }
        });
  }

  // No rank changes its words while others read them.
  void run(const AllReduceIntegers& reduce, std::uint64_t sequence) override {
    const Part part{"all_reduce_integers", reduce.subject, reduce.count(), reduce.data};
    const std::uint64_t size_bytes = reduce.count() * sizeof(std::uint64_t);
    std::vector<std::byte> combined(reduce.data, reduce.data + size_bytes);
    meet(
        part, sequence,
        [&](const Parts& parts) {
          for (std::uint32_t i = 0; i < rank_count(); ++i)
            if (i != rank())
              combine_integers(reduce, 0, reduce.count(), parts[i]->source, combined.data());
        },
        [&](const Parts&) {
          if (size_bytes != 0) std::memcpy(reduce.data, combined.data(), size_bytes);
        });
  }

  void run(const Broadcast& broadcast, std::uint64_t sequence) override {
    SLUICE_CHECK(broadcast.root < rank_count(), "the root is one of the ranks");
    const Part part{"broadcast", broadcast.subject, broadcast.size_bytes, broadcast.data};
    meet(part, sequence, [&](const Parts& parts) {
      if (rank() != broadcast.root && broadcast.size_bytes != 0)
        std::memcpy(broadcast.data, parts[broadcast.root]->source, broadcast.size_bytes);
    });
  }

  void run(const Barrier& barrier, std::uint64_t sequence) override {
    meet({"barrier", barrier.subject, 0, nullptr}, sequence, [](const Parts&) {});
  }

  // Constant after construction.
  std::shared_ptr<Membership> membership_;
  LocalWorld::Meetings& meetings_;
  std::uint64_t sequence_name_;
};

}  // namespace

LocalWorld::LocalWorld(std::uint32_t rank_count, const HostCollectivesOptions& options)
    : rank_count_(rank_count), meetings_(std::make_shared<Meetings>(options)) {
  SLUICE_CHECK(rank_count >= 1 && options.sum != nullptr && options.timeout_s >= 0.1,
               "a world has a rank, a sum and a timeout");
}
LocalWorld::~LocalWorld() = default;

std::unique_ptr<Collectives> LocalWorld::join(std::uint32_t rank, HostDevice& device) {
  return std::make_unique<LocalCollectives>(std::make_shared<Membership>(meetings_, rank), device,
                                            std::make_shared<RankFailure>(),
                                            RankGroup::world(rank, rank_count_));
}

}  // namespace sluice
