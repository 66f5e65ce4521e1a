// The ranks that train together, as the engine sees them. The object has each rank's part of the
// state and the sequences of collectives. The object also makes the decisions that all ranks make
// from the same values. The ZeRO stages 0 to 3 are presets of these parts. Without collectives
// there is one rank, and no bytes are moved.
//
// In hybrid sharding, `sharding.group_ranks` consecutive ranks form a group, and every group has a
// copy of the state. Gathers stay within the group. Gradients are added within each group, in rank
// order and fp32. Then the sums of the groups are added in the order of the groups, and the result
// is rounded once. With sharding.reduction "nodes", all ranks share one copy, and gather and add in
// two levels (gpu/ranks/two_level_collectives.h).
//
// Thread rule: the scheduler's thread calls gathers(), reduce() and take_traffic(). The
// application's thread calls everything else.
// Invariants: the order of every sequence follows from the schedule alone. The gathers come in the
// order of uses, and reductions in the order of backward uses. The gathers of units homed on the
// device come in forward order. The gathers of announced units come in the order of the
// announcements, and votes come in the order of the application's calls. Ranks may interleave these
// kinds differently, so each kind is a separate sequence.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/config.h>
#include <sluice/error.h>
#include <sluice/step_report.h>
#include "engine/plan/layout.h"
#include "engine/plan/sharding.h"
#include "engine/ranks/rank_sequence.h"

namespace sluice {

// The least and the largest value over all ranks.
struct RankRange {
  explicit RankRange(std::uint64_t own = 0) : least(own), most(own) {}
  bool is_equal() const { return least == most; }  // on all ranks

  std::uint64_t least;
  std::uint64_t most;
};

class Ranks {
 public:
  struct Reduction {
    const UnitPlace& unit;  // outlives the reduction
    std::byte* slot = nullptr;
    DType type = DType::kFp32;
    std::uint64_t step = 0;
  };

  // `collectives` may be null, for one rank. All arguments must outlive the object.
  Ranks(const Config::Sharding& sharding, Collectives* collectives, Device& device);
  // The device memory that this object takes.
  std::uint64_t device_bytes() const {
    return buffer_.size_bytes() + partial_.size_bytes() + gather_buffers_.size_bytes();
  }
  // The call takes the memory that reductions need, and opens the sequences that the model needs.
  // Afterwards device_bytes() is rank_buffer_bytes() of engine/plan/sharding.h. Called once.
  // Fails with kRanks if the ranks' models need different sequences.
  void reserve(const Config::Sharding& sharding, const Layout& layout);

  std::uint32_t rank() const { return rank_; }
  std::uint32_t count() const { return count_; }
  bool are_several() const { return count_ > 1; }

  // Whether ranks share the optimizer's state, or the parameters. Each of N ranks then has 1/N of
  // what is shared. The call shard_parameters() implies shard_optimizer().
  bool shard_optimizer() const { return shard_.count > 1; }
  bool shard_parameters() const { return shard_optimizer() && !shard_.keeps_all_parameters; }
  // The number of ranks, from rank 0 on, that together have all of the state.
  std::uint32_t owner_count() const { return shard_optimizer() ? group_ : 1; }
  // The part of the state from which the layout's blocks are cut.
  const Shard& shard() const { return shard_; }

  // The result is null for one rank.
  RankSequence* gathers() const { return gathers_.get(); }
  // This sequence is for announced units. The sequence is null if the model has no announced units.
  // Requires: reserve().
  RankSequence* announced_gathers() const { return announced_gathers_.get(); }
  // Requires: are_several().
  RankSequence& resident_gathers() const { return *resident_gathers_; }
  // Adds a unit's gradient over the ranks, in `slot`, after the work that is now on `stream`. The
  // part that this rank owns becomes the sum. If ranks do not share optimizer state, the whole
  // gradient becomes the sum. `then` runs on the scheduler's thread. From then on, later work on
  // `stream` waits for the sum. If operations do not block their caller, `then` has run on return.
  // Requires: `then` of the previous call has run.
  void reduce(Scheduler& scheduler, const Reduction& reduction, StreamId stream,
              const std::function<void()>& then);
  // The part of `gathered_bytes` that crosses from node to node.
  std::uint64_t crossing_bytes(std::uint64_t gathered_bytes) const {
    return has_nodes() ? gathered_bytes / first_level_ : 0;
  }
  // The bytes moved since the last call.
  RankTraffic take_traffic() { return std::exchange(traffic_, {}); }

  // Replaces `sums` by the sums over the ranks, and `ranges` by the unions over the ranks. One
  // operation computes both, and its size does not depend on the number of ranks. The call blocks.
  // All ranks make the call at the same point. `subject` must live until the call returns.
  // Fails with kRanks if a rank is gone or has failed.
  void all_reduce(std::span<std::uint64_t> sums, std::span<RankRange> ranges,
                  std::string_view subject);
  // Returns every rank's `own`, in the order of the ranks. The bytes are sent in pieces. Bytes and
  // time grow with the number of ranks. The call blocks until all ranks have exchanged their bytes.
  // The call can fail in the ways in which all_reduce() can.
  std::vector<std::byte> exchange(std::span<const std::byte> own, std::string_view subject);
  // The call copies `data` of rank `root` to all other ranks.
  void broadcast(std::span<std::byte> data, std::uint32_t root, std::string_view subject);
  // Returns every rank's own bytes, in the order of the ranks. Each rank's part has its own length.
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> own,
                                             std::string_view subject);
  // Returns rank 0's text on all ranks.
  std::string share(const std::string& text, std::string_view subject);
  // Checks that every rank gives the same description.
  // Fails with kRanks, naming `subject` and the ranks that differ.
  void require_agreement(std::string_view description, std::string_view subject);

  // Runs `body`. If `body` fails on one rank, the call fails on all ranks, so that all ranks stay
  // at the same point. The rank that failed throws its own exception, and the others throw an error
  // with the same code. For an exception that is no Error, the code is kInternal. The call blocks,
  // and fails as all_reduce() does.
  template <class Body>
  void together(std::string_view subject, const Body& body) {
    std::optional<Error> failure;
    try {
      body();
    } catch (const Error& error) {
      failure = error;
    } catch (const std::exception& error) {
      try {
        share_failure(Error(ErrorCode::kInternal, error.what()), subject);
      } catch (const Error&) {
        // All other ranks now know of the failure, and this rank throws the caught error.
      }
      throw;
    }
    share_failure(failure, subject);
  }

  // Device memory for gathered units and for gradients in reduction (Collectives::use_memory).
  void use_memory(std::span<std::byte> memory);
  // Each of Collectives::notes() once.
  std::vector<std::string> notes() const;
  void forget_memory() noexcept;

  // Sets the function that is called with the first failure.
  void on_failure(std::function<void(const Error&)> handler);

 private:
  // A part of a unit during a reduction.
  struct Part {
    std::byte* data = nullptr;
    std::uint64_t element_count = 0;
  };

  void share_failure(const std::optional<Error>& own, std::string_view subject);
  std::vector<std::uint32_t> ranks_of_group() const;
  std::unique_ptr<Collectives> open_level();
  void reserve_gathers(const Config::Sharding& sharding, const Layout& layout);
  bool is_hybrid() const { return group_ > 1 && group_ < count_; }
  bool has_nodes() const { return first_level_ > 1 && !is_hybrid(); }
  void reduce_now(const Reduction& reduction, StreamId stream);
  void count_reduced(const UnitPlace& unit, DType type);
  void reduce_in_group(const UnitPlace& unit, std::byte* slot, DType type, StreamId stream);
  void reduce_across(const Part& part, DType type, std::string_view subject, StreamId stream);

  // Constant after construction.
  Collectives* collectives_;
  Device& device_;
  std::uint32_t rank_ = 0;
  std::uint32_t count_ = 1;
  std::uint32_t group_ = 1;        // ranks in a group; consecutive
  std::uint32_t first_level_ = 1;  // ranks that add among themselves first
  Shard shard_;
  std::unique_ptr<RankSequence> gathers_;
  std::unique_ptr<RankSequence> resident_gathers_;
  std::unique_ptr<RankSequence> announced_gathers_;  // from reserve() on
  std::unique_ptr<RankSequence> reductions_;
  std::unique_ptr<RankSequence> votes_;
  std::unique_ptr<Collectives> across_;  // hybrid: over the ranks of equal place in their groups
  DeviceBuffer buffer_;                  // for votes
  DeviceBuffer partial_;                 // sums of the first level, in fp32; from reserve() on
  DeviceBuffer gather_buffers_;          // nodes: parts of other nodes; from reserve() on
  Stream stream_;
  // Reductions whose calls may block have a stream of their own, so that the scheduler can go on
  // with the stream of the gradients.
  Stream reduce_stream_;
  Event before_reduction_;
  Event after_reduction_;

  RankTraffic traffic_;  // scheduler's thread only
};

}  // namespace sluice
