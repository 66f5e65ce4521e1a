// The votes of a step: what all ranks do equally, and the norm of all ranks' gradients.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <exception>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "base/float_environment.h"
#include "engine/step/reduction_order.h"
#include "engine/step/step_loop.h"

namespace sluice {
namespace {

constexpr std::uint64_t kNoUnit = kTraceNone;

// A rank's values at one point of a step. The least and the most of each travel with the norm's
// words, and all have to be equal. A value whose least or most decides, such as how far a rank has
// fetched, is one more of them. All votes of a step have one form, so that ranks at different
// points notice it.
struct StepVote {
  std::uint64_t learning_rate = 0;     // its bits
  std::uint64_t gradient_divisor = 0;  // likewise
  std::uint64_t group_rates = 0;       // a hash of them
  std::uint64_t micro_batches = 0;
  std::uint64_t order = 0;
  std::uint64_t step = 0;
  std::uint64_t use = 0;            // the next one
  std::uint64_t unit = kNoUnit;     // that comes instead of the expected one; none: the step ends
  std::uint64_t pass = 0;           // of that unit
  std::uint64_t at_norm = 0;        // a NormCall, or 0
  std::uint64_t is_announcing = 0;  // units for `pass`
  std::uint64_t reductions = 0;     // a hash of their order so far

  static constexpr std::size_t kCount = 12;
  std::array<RankRange, kCount> ranges() const {
    return {RankRange(learning_rate), RankRange(gradient_divisor),
            RankRange(group_rates),   RankRange(micro_batches),
            RankRange(order),         RankRange(step),
            RankRange(use),           RankRange(unit),
            RankRange(pass),          RankRange(at_norm),
            RankRange(is_announcing), RankRange(reductions)};
  }
  std::string text(const Layout& layout, const StepVote& other) const {
    const double divisor = std::bit_cast<double>(gradient_divisor);
    std::string text = fmt::format("in step {} with learning rate {} and {} {} micro-batches",
                                   step + 1, std::bit_cast<double>(learning_rate), micro_batches,
                                   name_of(MicroBatchOrder{static_cast<std::uint8_t>(order)}));
    if (divisor != static_cast<double>(micro_batches))
      text += fmt::format(" divided by {}", divisor);
    if (group_rates != 0) text += fmt::format(", groups' rates of hash {:x}", group_rates);
    if (unit != kNoUnit)
      text += fmt::format(", with use {} of unit \"{}\" ({})", use,
                          layout.unit(UnitId{static_cast<std::uint32_t>(unit)}).name,
                          name_of(Pass{static_cast<std::uint8_t>(pass)}));
    if (is_announcing != 0)
      text += fmt::format(", which announces units ({}) behind {} uses",
                          name_of(Pass{static_cast<std::uint8_t>(pass)}), use);
    if (reductions != other.reductions)
      text += fmt::format(", whose backward uses come in an order of hash {:x}", reductions);
    if (at_norm == static_cast<std::uint64_t>(NormCall::kBefore))
      text += fmt::format(", whose norm is asked for before finish(), behind {} uses", use);
    if (unit == kNoUnit && at_norm == 0 && is_announcing == 0)
      text += fmt::format(", which ends early, behind {} uses", use);
    return text;
  }
  friend bool operator==(const StepVote&, const StepVote&) = default;
};

std::uint64_t hash_of(std::span<const double> values) {
  std::uint64_t hash = 0;
  for (const double value : values) hash = mixed_hash(hash, std::bit_cast<std::uint64_t>(value));
  return hash;
}

// All ranks have seen that one differs; this says which.
[[noreturn]] void fail_unequal(Ranks& ranks, const Layout& layout, const StepVote& own) {
  const std::vector<std::byte> all =
      ranks.exchange(std::as_bytes(std::span(&own, 1)), "the options of the step");
  StepVote vote = own;
  std::uint32_t rank = 0;
  for (; rank < ranks.count() && vote == own; ++rank)
    std::memcpy(&vote, all.data() + rank * sizeof vote, sizeof vote);
  std::string remedy = "all must take equal steps";
  if (vote.reductions != own.reductions)
    remedy += "; in backward, use announced units at the same places between the others";
  throw Error(ErrorCode::kRanks,
              fmt::format("rank {} is {}, rank {} {}; {}", rank - 1, vote.text(layout, own),
                          ranks.rank(), own.text(layout, vote), remedy));
}

// Adds `words` over the ranks, and replaces `most` by the largest of all.
void vote(Ranks& ranks, const Layout& layout, const StepVote& own, NormAccumulator::Words& words,
          std::uint64_t& most, std::string_view subject) {
  std::array<RankRange, StepVote::kCount + 1> ranges;
  const auto equal = std::span(ranges).first(StepVote::kCount);
  std::ranges::copy(own.ranges(), equal.begin());
  ranges.back() = RankRange(most);
  ranks.all_reduce(words, ranges, subject);
  most = ranges.back().most;
  if (!std::ranges::all_of(equal, &RankRange::is_equal)) fail_unequal(ranks, layout, own);
}

StepVote vote_of(const StepOptions& options, std::uint64_t step, std::uint32_t use,
                 std::uint64_t reductions) {
  return {.learning_rate = std::bit_cast<std::uint64_t>(options.learning_rate),
          .gradient_divisor = std::bit_cast<std::uint64_t>(
              options.gradient_divisor.value_or(options.micro_batches)),
          .group_rates = hash_of(options.group_learning_rates),
          .micro_batches = options.micro_batches,
          .order = static_cast<std::uint64_t>(options.order),
          .step = step,
          .use = use,
          .reductions = reductions};
}

// A point at which a member asks for the norm.
struct NormPoint {
  std::uint64_t step = 0;
  double divisor = 1;
  bool is_before_finish = false;
};

// With the norm's words travel one, the point in training and the gradients' divisor, and the
// squares of both. If all members have the same values, the sums are the number of members times
// the own values. The squares tell a member whose values happen to be the mean of all.
NormAccumulator over_group(const NormGroup& group, const NormAccumulator& own,
                           const NormPoint& at) {
  NormAccumulator::Words words = own.words();
  const std::uint64_t point = 2 * at.step - (at.is_before_finish ? 1 : 0);
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(at.divisor);
  const std::array<std::uint64_t, 4> equal{point, bits, point * point, bits * bits};
  std::vector<std::uint64_t> sums(words.begin(), words.end());
  sums.push_back(1);
  sums.insert(sums.end(), equal.begin(), equal.end());
  {
    const FloatEnvironment environment;  // the function may change it
    group.add(sums);
  }
  const std::uint64_t members = sums[words.size()];
  for (std::size_t i = 0; i < equal.size(); ++i) {
    if (sums[words.size() + 1 + i] == members * equal[i]) continue;
    throw Error(
        ErrorCode::kRanks,
        fmt::format("the {} members of the norm group take different steps: here it is "
                    "step {}{}, whose gradients are divided by {}; all have to call "
                    "finish() equally often, with equal micro-batches and loss scales, and "
                    "to ask for the norm before finish() at the same points",
                    members, at.step, at.is_before_finish ? " before finish()" : "", at.divisor));
  }
  std::copy_n(sums.begin(), words.size(), words.begin());
  return NormAccumulator::of_words(words);
}

// The announced units that at least one rank gives, in the order of the model. Each unit has as
// many bits of the norm's words as the number of ranks needs.
std::vector<UnitId> union_over(Ranks& ranks, const Layout& layout, const StepVote& own,
                               const AnnouncedUnits& announced, std::span<const UnitId> units) {
  NormAccumulator::Words words{};
  const auto bits = static_cast<std::size_t>(std::bit_width(ranks.count()));
  const std::size_t units_a_word = 64 / bits;
  const std::size_t units_a_vote = words.size() * units_a_word;
  const std::span<const UnitId> all = announced.all();
  std::vector<UnitId> result;
  for (std::size_t begin = 0; begin < all.size(); begin += units_a_vote) {
    words = {};
    for (const UnitId unit : units) {
      const std::size_t number = announced.number_of(unit) - begin;  // huge for earlier ones
      if (number < units_a_vote)
        words[number / units_a_word] += std::uint64_t{1} << number % units_a_word * bits;
    }
    std::uint64_t none = 0;
    vote(ranks, layout, own, words, none, "announced units");
    for (std::size_t number = 0; number < std::min(units_a_vote, all.size() - begin); ++number) {
      const std::uint64_t count = words[number / units_a_word] >> number % units_a_word * bits;
      if ((count & ((std::uint64_t{1} << bits) - 1)) != 0) result.push_back(all[begin + number]);
    }
  }
  return result;
}

// Records `event`, which brackets a vote, behind the computation on `stream`. The vote must come in
// any case, because the other ranks wait for it; without its events, the step's times only lack it.
bool mark_vote(Device& device, EventId event, StreamId stream) noexcept {
  try {
    device.record(event, stream);
    return true;
  } catch (...) {
    // As in record_lease_end(): the stream is gone, or the device has failed and says so later.
    return false;
  }
}

}  // namespace

// All members derive the same decisions from the result.
NormAccumulator StepLoop::agree(NormAccumulator norm, const StepOptions& options, NormCall call) {
  if (ranks_.are_several()) {
    StepVote own = vote_of(options, step_, acquired_together_, reductions_.hash());
    own.at_norm = static_cast<std::uint64_t>(call);
    const bool is_owner = ranks_.rank() < ranks_.owner_count();  // else a copy of an owner's
    NormAccumulator::Words words = (is_owner ? norm : drain_.local_norm()).words();
    std::uint64_t none = 0;
    vote(ranks_, layout_, own, words, none, "the gradient norm");
    if (commits_ && call == NormCall::kFinish)
      scheduler_.run([this] { commits_->count_for_all(); });
    norm = NormAccumulator::of_words(words);
  }
  if (!norm_group_.add) return norm;
  try {
    return over_group(norm_group_, norm,
                      {.step = step_ + 1,
                       .divisor = terms_.gradient_count(options, scaler_.scale()),
                       .is_before_finish = call == NormCall::kBefore});
  } catch (const Error& error) {
    scheduler_.fail(error);
    throw;
  } catch (const std::exception& error) {
    scheduler_.fail(Error(ErrorCode::kRanks,
                          fmt::format("the function of the norm group failed: {}", error.what())));
    throw;
  } catch (...) {
    scheduler_.fail(Error(ErrorCode::kRanks, "the function of the norm group failed"));
    throw;
  }
}

std::vector<UnitId> StepLoop::announce(std::span<const UnitId> units, Pass pass) {
  failure_.throw_if_unusable();
  const auto refuse = [](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, "announce: " + message);
  };
  cursor_.check_use("announce", pass);
  if (!announced_) refuse("the model has no announced units; set UnitSpec::is_announced");
  if ((pass == Pass::kInference) != cursor_.is_inference())
    refuse(fmt::format("pass \"{}\" does not belong to {}", name_of(pass),
                       cursor_.is_inference() ? "an inference" : "a training step"));
  announced_->check_announcement(units);
  std::vector<UnitId> agreed(units.begin(), units.end());
  const bool are_own = !units.empty() && announced_->is_own(units.front());
  if (ranks_.are_several() && !are_own) {
    StepVote own = vote_of(cursor_.is_inference() ? StepOptions() : terms_.options(), step_,
                           acquired_together_, reductions_.hash());
    own.is_announcing = 1;
    own.pass = static_cast<std::uint64_t>(pass);
    while (vote_events_.size() < 2 * (votes_ + 1)) vote_events_.emplace_back(device_);
    const EventId asked = vote_events_[2 * votes_].id();
    const EventId granted = vote_events_[2 * votes_ + 1].id();
    ++votes_;
    const StreamId last = acquired_ == 0 ? StreamId{} : uses_[acquired_ - 1].stream;
    const bool is_timed = acquired_ != 0 && mark_vote(device_, asked, last);
    agreed = union_over(ranks_, layout_, own, *announced_, units);
    if (is_timed && mark_vote(device_, granted, last))
      timeline_.pause(asked, granted, {.reason = TraceReason::kAnnounce});
  }
  scheduler_.run([&] {
    for (const UnitId unit : agreed) pass_.catch_up(layout_.unit(unit));
    uses_.resize(uses_.size() + agreed.size());
    announced_->add(agreed, pass);
  });
  timeline_.lengthen(agreed.size());
  return agreed;
}

// How far a rank has fetched ahead depends on its timing. Where each fetch is a gather, all fetch
// as far as the one that is the farthest.
WindowProgress StepLoop::halt_fetches(Prefetcher& fetches, std::optional<UnitId> unit, Pass pass) {
  const std::uint32_t acquired =
      &fetches == &prefetcher_ ? cursor_.next() : announced_->shared_come();
  WindowProgress progress;
  scheduler_.run([&] {
    fetches.stop();
    progress = fetches.progress(acquired);
  });
  if (ranks_.are_several()) {
    // The options of a step say nothing about an inference.
    StepVote own = vote_of(cursor_.is_inference() ? StepOptions() : terms_.options(), step_,
                           acquired_together_, reductions_.hash());
    if (unit) own.unit = index_of(*unit);
    own.pass = static_cast<std::uint64_t>(pass);
    NormAccumulator::Words none{};
    std::uint64_t fetched = progress.fetched + (progress.is_partly_fetched ? 1 : 0);
    try {
      vote(ranks_, layout_, own, none, fetched, "a change of the schedule");
    } catch (...) {                               // an Error, or what computation has thrown
      scheduler_.fail(std::current_exception());  // fetching has stopped, and there is no way on
      throw;
    }
    if (ranks_.shard_parameters())
      scheduler_.run([&] { fetches.fetch_up_to(static_cast<std::uint32_t>(fetched)); });
  }
  failure_.await([&] {
    progress = fetches.progress(acquired);
    return fetches.has_stopped();
  });
  return progress;
}

// Gathers that some ranks have begun need the others, too. A failure comes back at the next call.
void StepLoop::end_inference_together() noexcept {
  if (!ranks_.shard_parameters() || !cursor_.is_inference()) return;
  try {
    if (!cursor_.is_over()) (void)halt_fetches(prefetcher_, {}, Pass::kInference);
    if (announced_ && !announced_->are_shared_over())
      (void)halt_fetches(announced_->shared_fetches(), {}, Pass::kInference);
  } catch (...) {  // NOLINT(bugprone-empty-catch)
    // Computation may have thrown anything, which the device throws again while ranks vote.
  }
}

}  // namespace sluice
