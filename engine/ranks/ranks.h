// This class represents the ranks that train together. A Ranks object knows this rank's part of the
// state, and has the sequences of collectives. The object also makes the decisions that must be
// equal on all ranks. All ranks make these decisions from the same values. The ZeRO stages 0 to 3
// are presets for the part of the state that a rank keeps (Shard). Without collectives there is
// only one rank, and no bytes are sent.
//
// In hybrid sharding, `sharding.group_ranks` consecutive ranks form a group, and every group has a
// copy of the state. The gathers stay within the group. Gradients are first added in fp32 within
// each group, in the order of the ranks. Then the sums of the groups are added, in the order of the
// groups. The result is rounded once. With sharding.reduction "nodes", all ranks share one copy of
// the state. The gathers and the additions then have two levels
// (gpu/ranks/two_level_collectives.h).
//
// Thread rule: the scheduler's thread calls gathers(), reduce() and take_traffic(). The
// application's thread calls everything else.
// Invariants: the order of every sequence follows from the schedule alone. The gathers come in the
// order of the uses. The reductions come in the order of the backward uses. The gathers of units
// whose home is the device come in forward order. The gathers of announced units come in the order
// of the announcements. The votes come in the order of the application's calls. Ranks may
// interleave these kinds of operations differently, so each kind has a separate sequence.
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
#include "engine/ranks/vote_buffers.h"

namespace sluice {

// The smallest and the largest value over all ranks.
struct RankRange {
  explicit RankRange(std::uint64_t own = 0) : least(own), most(own) {}
  bool is_equal() const { return least == most; }  // on all ranks

  std::uint64_t least;
  std::uint64_t most;
};

// The functions check the config before ranks meet. So a wrong config costs no meeting.
// require_levels() fails with kConfig if `count` ranks cannot have these groups or nodes.
void require_levels(const Config::Sharding& sharding, std::uint32_t count);
// Fails with kConfig if the reduction is only for ranks on GPUs.
void require_host_reduction(const Config::Sharding& sharding);

class Ranks {
 public:
  struct Reduction {
    const UnitPlace& unit;  // outlives the reduction
    std::byte* slot = nullptr;
    DType type = DType::kFp32;
    std::uint64_t step = 0;
  };

  // If there is only one rank, `collectives` may be null. All arguments must outlive the object.
  Ranks(const Config::Sharding& sharding, Collectives* collectives, Device& device);
  // The device memory that this object takes.
  std::uint64_t device_bytes() const {
    return (buffers_ == nullptr ? 0 : buffers_->size_bytes()) + partial_.size_bytes() +
           gather_buffers_.size_bytes();
  }
  // Allocates the memory for reductions, and opens the sequences of collectives that the model
  // needs. Afterwards, device_bytes() equals rank_buffer_bytes() of engine/plan/sharding.h. Must be
  // called only once.
  // Fails with kRanks if the ranks' models need different sequences.
  void reserve(const Config::Sharding& sharding, const Layout& layout);

  std::uint32_t rank() const { return rank_; }
  std::uint32_t count() const { return count_; }
  bool are_several() const { return count_ > 1; }

  // shard_optimizer() says whether ranks share the optimizer's state. shard_parameters() says
  // whether ranks share the parameters. If N ranks share the state, each rank has 1/N of this
  // state. If shard_parameters() is true, shard_optimizer() is true, too.
  bool shard_optimizer() const { return shard_.count > 1; }
  bool shard_parameters() const { return shard_optimizer() && !shard_.keeps_all_parameters; }
  // The result is the smallest number n for which ranks 0 .. n - 1 together have all of the state.
  std::uint32_t owner_count() const { return shard_optimizer() ? group_ : 1; }
  // The part of the state that the layout cuts into blocks.
  const Shard& shard() const { return shard_; }

  // The result is null if there is only one rank.
  RankSequence* gathers() const { return gathers_.get(); }
  // The sequence for announced units. The result is null if the model has no announced units.
  // Requires: reserve().
  RankSequence* announced_gathers() const { return announced_gathers_.get(); }
  // Requires: are_several().
  RankSequence& resident_gathers() const { return *resident_gathers_; }
  // Adds up the gradients that the ranks have for a unit. The addition takes place in
  // `reduction.slot`, after the work that is now on `stream`. Afterwards, the part of the slot that
  // this rank owns contains the sum. If ranks do not share optimizer state, the whole slot contains
  // the sum. The function `then` runs on the scheduler's thread. If the function `then` or later
  // code enqueues work on `stream`, this work waits for the sum. If operations do not block their
  // caller, the function `then` has already run when the call returns. Requires: the function
  // `then` of the previous call has run.
  void reduce(Scheduler& scheduler, const Reduction& reduction, StreamId stream,
              const std::function<void()>& then);
  // The part of `gathered_bytes` that moves from one node to another.
  std::uint64_t crossing_bytes(std::uint64_t gathered_bytes) const {
    return has_nodes() ? gathered_bytes / first_level_ : 0;
  }
  // Returns the traffic since the last call.
  RankTraffic take_traffic() { return std::exchange(traffic_, {}); }

  // Replaces `sums` by the sums over the ranks, and `ranges` by the unions over the ranks. One
  // operation computes both results. The size of this operation does not depend on the number of
  // ranks. The call blocks. All ranks make the call at the same point. `subject` must live until
  // the call returns.
  // Fails with kRanks if a rank is gone or has failed.
  void all_reduce(std::span<std::uint64_t> sums, std::span<RankRange> ranges,
                  std::string_view subject);
  // Returns the bytes that every rank passes as `own`, in the order of the ranks. The bytes are
  // sent in pieces. The number of bytes and the time grow with the number of ranks. The call blocks
  // until all ranks have exchanged their bytes. The call can fail in the same ways as all_reduce().
  std::vector<std::byte> exchange(std::span<const std::byte> own, std::string_view subject);
  // Copies `data` of rank `root` to all other ranks.
  void broadcast(std::span<std::byte> data, std::uint32_t root, std::string_view subject);
  // Returns the bytes that every rank passes as `own`, in the order of the ranks. The numbers of
  // bytes may differ from rank to rank.
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> own,
                                             std::string_view subject);
  // Returns the text of rank 0. All ranks get the same result.
  std::string share(const std::string& text, std::string_view subject);
  // Checks that every rank gives the same description.
  // Fails with kRanks if the descriptions differ. The message names `subject` and the ranks that
  // differ.
  void require_agreement(std::string_view description, std::string_view subject);

  // Runs `body`. If `body` fails on one rank, the call fails on all ranks, so that all ranks stay
  // at the same point. The rank that failed throws its own exception, and the others throw an error
  // with the same code. If the exception is not an Error, the code is kInternal. The call blocks,
  // and can fail in the same ways as all_reduce().
  template <class Body>
  void together(std::string_view subject, const Body& body) {
    std::optional<Error> failure;
    try {
      body();
    } catch (const Error& error) {
      failure = error;
    } catch (...) {
      try {
        share_failure(Error(ErrorCode::kInternal, std::string(subject)), subject);
      } catch (const Error&) {
        // All other ranks now know of the failure, and this rank throws the caught error.
      }
      throw;
    }
    share_failure(failure, subject);
  }

  // Like together(), for a body that may take longer on one rank than other ranks wait
  // (sharding.timeout). The ranks exchange beside the body, which runs on the calling thread and
  // makes no call of this object.
  void together_for_long(std::string_view subject, const std::function<void()>& body);

  // Registers `memory` with the collectives (Collectives::use_memory). This memory holds gathered
  // units, or holds gradients during a reduction.
  void use_memory(std::span<std::byte> memory);
  // The notes of all collectives (Collectives::notes). Each note is in the list only once.
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
  std::uint32_t first_level_ = 1;  // number of ranks that first add up their gradients
  Shard shard_;
  std::unique_ptr<RankSequence> gathers_;
  std::unique_ptr<RankSequence> resident_gathers_;
  std::unique_ptr<RankSequence> announced_gathers_;  // from reserve() on
  std::unique_ptr<RankSequence> reductions_;
  std::unique_ptr<RankSequence> votes_;
  std::unique_ptr<Collectives> across_;   // hybrid: over ranks with equal places in their groups
  std::unique_ptr<VoteBuffers> buffers_;  // null if there is only one rank
  DeviceBuffer partial_;                  // sums of the first level, in fp32; from reserve() on
  DeviceBuffer gather_buffers_;           // nodes: parts of other nodes; from reserve() on
  Stream stream_;
  // If the calls that start reductions may block, reductions have their own stream. So the
  // scheduler can go on using the stream of the gradients.
  Stream reduce_stream_;
  Event before_reduction_;
  Event after_reduction_;

  RankTraffic traffic_;  // scheduler's thread only
};

}  // namespace sluice
