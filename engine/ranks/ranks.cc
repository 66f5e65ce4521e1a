#include "engine/ranks/ranks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/ranks/local_units.h"
#include "gpu/ranks/two_level_collectives.h"
#include "io/checksum.h"

namespace sluice {
namespace {

CollectiveSpan vote_span(std::uint64_t size_bytes) {
  return {.unit = UnitId{kTraceNone}, .size_bytes = size_bytes, .detail = kTraceVote};
}

// The number of sequences that a rank opens depends on its groups and nodes. Ranks that open
// unequal numbers would wait for each other.
void require_equal_levels(const Config::Sharding& sharding, Collectives& ranks,
                          VoteBuffers& buffers, StreamId stream) {
  const std::uint32_t count = ranks.rank_count();
  const std::uint64_t group = sharding.group_ranks == 0 ? count : sharding.group_ranks;
  const std::uint64_t node = sharding.reduction == RankReduction::kNodes ? sharding.node_ranks : 0;
  std::array<std::uint64_t, 4> least = {group, ~group, node, ~node};
  buffers.put(std::as_bytes(std::span(least)), 0, stream);
  ranks.all_reduce_integers({.data = buffers.on_device(),
                             .minimum_count = least.size(),
                             .subject = "sharding.group and sharding.node_ranks"},
                            stream);
  buffers.get(std::as_writable_bytes(std::span(least)), stream);
  const auto require = [&](std::string_view what, std::uint64_t smallest, std::uint64_t largest) {
    if (smallest == largest) return;
    throw Error(ErrorCode::kRanks,
                fmt::format("rank {} of {}: {} is {} on one rank and {} on another; start every "
                            "rank with the same config and model",
                            ranks.rank(), count, what, smallest, largest));
  };
  require("sharding.group", least[0], ~least[1]);
  require("sharding.node_ranks with sharding.reduction \"nodes\" (0: another reduction)", least[2],
          ~least[3]);
}

}  // namespace

void require_levels(const Config::Sharding& sharding, std::uint32_t count) {
  require_group_number(sharding, count);
  (void)first_level_ranks(sharding, count);
}

void require_host_reduction(const Config::Sharding& sharding) {
  if (sharding.reduction == RankReduction::kNccl)
    throw Error(ErrorCode::kConfig,
                "sharding.reduction \"nccl\" is for ranks on GPUs; set run.device to \"cuda\" "
                "(RankDevice::kGpu), or sharding.reduction to \"exact\"");
}

Ranks::Ranks(const Config::Sharding& sharding, Collectives* collectives, Device& device)
    : collectives_(collectives), device_(device) {
  if (collectives == nullptr) return;
  if (collectives->memory_device() != nullptr && collectives->memory_device() != &device)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("ranks: the collectives \"{}\" of rank {} of {} are of another device "
                            "than the engine's \"{}\"; join with the device of the engine",
                            collectives->name(), collectives->rank(), collectives->rank_count(),
                            device.name()));
  rank_ = collectives->rank();
  count_ = collectives->rank_count();
  if (!are_several()) return;
  buffers_ = std::make_unique<VoteBuffers>(device, vote_buffer_bytes(count_), "votes of the ranks");
  stream_ = Stream(device, "votes");
  require_equal_levels(sharding, *collectives, *buffers_, stream_.id());
  group_ = group_size(sharding, count_);
  first_level_ = first_level_ranks(sharding, count_);
  shard_ = shard_of(sharding, rank_, count_);
  std::vector<std::uint32_t> all(count_);
  std::iota(all.begin(), all.end(), 0u);
  for (auto* const sequence : {&gathers_, &resident_gathers_, &reductions_})
    *sequence = std::make_unique<RankSequence>(open_level(), device);
  votes_ = std::make_unique<RankSequence>(collectives->open(all), device);
  if (is_hybrid()) {
    std::vector<std::uint32_t> peers;
    for (std::uint32_t rank = rank_ % group_; rank < count_; rank += group_) peers.push_back(rank);
    across_ = collectives->open(peers);
    across_->prepare_reductions();
  }
  reductions_->collectives().prepare_reductions();
  if (reductions_->collectives().may_block()) {
    reduce_stream_ = Stream(device, "reductions", StreamPriority::kHigh);
    before_reduction_ = Event(device);
    after_reduction_ = Event(device);
  }
}

std::vector<std::uint32_t> Ranks::ranks_of_group() const {
  std::vector<std::uint32_t> ranks(is_hybrid() ? group_ : count_);
  std::iota(ranks.begin(), ranks.end(), is_hybrid() ? rank_ / group_ * group_ : 0u);
  return ranks;
}

// The ranks of this rank's group, which may gather and add in two levels.
std::unique_ptr<Collectives> Ranks::open_level() {
  if (has_nodes())
    return std::make_unique<TwoLevelCollectives>(*collectives_, first_level_, device_);
  return collectives_->open(ranks_of_group());
}

void Ranks::reserve(const Config::Sharding& sharding, const Layout& layout) {
  const auto count = [&](auto member) {
    return RankRange(static_cast<std::uint64_t>(std::ranges::count_if(layout.units(), member)));
  };
  std::array<RankRange, 2> counts = {count(&UnitPlace::is_announced), count(&UnitPlace::is_local)};
  all_reduce({}, counts, "the number of announced units");
  const auto& [announced, local] = counts;
  if (local.most != 0) check_local_units(layout, *this);
  if (!announced.is_equal())
    throw Error(ErrorCode::kRanks,
                fmt::format("one rank's model has {} announced units, another's {}; all need the "
                            "same model",
                            announced.least, announced.most));
  if (are_several() && announced.most != local.most)
    announced_gathers_ = std::make_unique<RankSequence>(open_level(), device_);
  reserve_gathers(sharding, layout);
  const std::uint64_t elements = partial_sum_elements(sharding, count_, layout);
  if (elements == 0) return;
  partial_ = DeviceBuffer(device_, elements * sizeof(float), "gradients summed in a group or node");
  if (has_nodes())
    dynamic_cast<TwoLevelCollectives&>(reductions_->collectives())
        .use_for_sums({partial_.data(), partial_.size_bytes()});
}

void Ranks::reserve_gathers(const Config::Sharding& sharding, const Layout& layout) {
  const std::uint64_t bytes = gather_buffer_bytes(sharding, count_, layout);
  if (bytes == 0) return;
  gather_buffers_ = DeviceBuffer(device_, bytes * gather_buffer_count(layout),
                                 "parameters gathered from other nodes");
  std::byte* buffer = gather_buffers_.data();
  for (RankSequence* const sequence :
       {gathers_.get(), resident_gathers_.get(), announced_gathers_.get()}) {
    if (sequence == nullptr) continue;
    dynamic_cast<TwoLevelCollectives&>(sequence->collectives()).use_for_gathers({buffer, bytes});
    buffer += bytes;
  }
}

std::vector<std::byte> Ranks::exchange(std::span<const std::byte> own, std::string_view subject) {
  std::vector<std::byte> all(own.size() * count_);
  if (!are_several()) {
    std::ranges::copy(own, all.begin());
    return all;
  }
  const std::uint64_t piece_max = buffers_->size_bytes() / count_;
  std::vector<std::byte> gathered;
  for (std::uint64_t begin = 0; begin < own.size(); begin += piece_max) {
    const auto piece = own.subspan(begin, std::min(piece_max, own.size() - begin));
    gathered.resize(piece.size() * count_);
    buffers_->put(piece, rank_ * piece.size(), stream_.id());
    votes_->all_gather({.target = buffers_->on_device(),
                        .source = buffers_->on_device() + rank_ * piece.size(),
                        .shard_bytes = piece.size(),
                        .subject = subject},
                       vote_span(gathered.size()), stream_.id());
    buffers_->get(gathered, stream_.id());
    for (std::uint64_t rank = 0; rank < count_; ++rank)
      std::copy_n(gathered.begin() + static_cast<std::ptrdiff_t>(rank * piece.size()), piece.size(),
                  all.begin() + static_cast<std::ptrdiff_t>(rank * own.size() + begin));
  }
  return all;
}

// The largest value is the complement of the least of the complements.
void Ranks::all_reduce(std::span<std::uint64_t> sums, std::span<RankRange> ranges,
                       std::string_view subject) {
  if (!are_several()) return;
  std::vector<std::uint64_t> words(sums.begin(), sums.end());
  for (const RankRange& range : ranges) words.insert(words.end(), {range.least, ~range.most});
  const auto bytes = std::as_writable_bytes(std::span(words));
  buffers_->put(bytes, 0, stream_.id());
  votes_->run(vote_span(bytes.size()), stream_.id(), [&] {
    votes_->collectives().all_reduce_integers({.data = buffers_->on_device(),
                                               .sum_count = sums.size(),
                                               .minimum_count = 2 * ranges.size(),
                                               .subject = subject},
                                              stream_.id());
  });
  buffers_->get(bytes, stream_.id());
  std::copy_n(words.begin(), sums.size(), sums.begin());
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    ranges[i].least = words[sums.size() + 2 * i];
    ranges[i].most = ~words[sums.size() + 2 * i + 1];
  }
}

void Ranks::broadcast(std::span<std::byte> data, std::uint32_t root, std::string_view subject) {
  if (!are_several()) return;
  for (std::uint64_t begin = 0; begin < data.size(); begin += buffers_->size_bytes()) {
    const auto piece = data.subspan(begin, std::min(buffers_->size_bytes(), data.size() - begin));
    if (root == rank_) buffers_->put(piece, 0, stream_.id());
    votes_->run(vote_span(piece.size()), stream_.id(), [&] {
      votes_->collectives().broadcast({.data = buffers_->on_device(),
                                       .size_bytes = piece.size(),
                                       .root = root,
                                       .subject = subject},
                                      stream_.id());
    });
    buffers_->get(piece, stream_.id());
  }
}

std::vector<std::vector<std::byte>> Ranks::gather(std::span<const std::byte> own,
                                                  std::string_view subject) {
  const std::uint64_t own_bytes = own.size();
  RankRange length(own_bytes);
  all_reduce({}, std::span(&length, 1), subject);
  std::vector<std::byte> padded(sizeof own_bytes + length.most);
  std::memcpy(padded.data(), &own_bytes, sizeof own_bytes);
  std::ranges::copy(own, padded.begin() + sizeof own_bytes);
  const std::vector<std::byte> all = exchange(padded, subject);
  std::vector<std::vector<std::byte>> said;
  for (std::uint32_t rank = 0; rank < count_; ++rank) {
    const std::byte* const begin = all.data() + rank * padded.size();
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, begin, sizeof bytes);
    SLUICE_CHECK(bytes <= length.most, "a rank says no more than it has announced");
    said.emplace_back(begin + sizeof bytes, begin + sizeof bytes + bytes);
  }
  return said;
}

std::string Ranks::share(const std::string& text, std::string_view subject) {
  RankRange length(rank_ == 0 ? text.size() : 0);
  all_reduce({}, std::span(&length, 1), subject);
  std::string shared = text;
  shared.resize(length.most);
  if (are_several() && length.most != 0)
    broadcast(std::as_writable_bytes(std::span(shared)), 0, subject);
  return shared;
}

void Ranks::require_agreement(std::string_view description, std::string_view subject) {
  const std::uint64_t own = checksum(std::as_bytes(std::span(description)));
  RankRange range(own);
  all_reduce({}, std::span(&range, 1), subject);
  if (range.is_equal()) return;
  const std::vector<std::byte> all = exchange(std::as_bytes(std::span(&own, 1)), subject);
  std::vector<std::uint32_t> others;
  for (std::uint32_t rank = 1; rank < count_; ++rank) {
    if (std::memcmp(all.data(), all.data() + rank * sizeof own, sizeof own) != 0)
      others.push_back(rank);
  }
  throw Error(ErrorCode::kRanks,
              fmt::format("rank {} of {}: {} differs between rank 0 and rank {}; start every rank "
                          "with the same config and model",
                          rank_, count_, subject, fmt::join(others, ", ")));
}

void Ranks::reduce(Scheduler& scheduler, const Reduction& reduction, StreamId stream,
                   const std::function<void()>& then) {
  count_reduced(reduction.unit, reduction.type);
  if (!reductions_->collectives().may_block()) {
    reduce_now(reduction, stream);
    return then();
  }
  device_.record(before_reduction_.id(), stream);
  reductions_->submit(
      scheduler,
      [this, reduction] {
        device_.wait(reduce_stream_.id(), before_reduction_.id());
        reduce_now(reduction, reduce_stream_.id());
        device_.record(after_reduction_.id(), reduce_stream_.id());
      },
      [this, stream, then] {
        device_.wait(stream, after_reduction_.id());
        then();
      });
}

void Ranks::count_reduced(const UnitPlace& unit, DType type) {
  const std::uint64_t payload_bytes = unit.payload_elements * size_of(type);
  traffic_.reduced_bytes += payload_bytes;
  if (!shard_optimizer()) traffic_.gathered_bytes += payload_bytes;
  if (has_nodes()) traffic_.crossed_bytes += unit.payload_elements * sizeof(float) / first_level_;
  if (is_hybrid())
    traffic_.crossed_bytes += unit.payload_elements * (sizeof(float) + size_of(type)) / group_;
}

void Ranks::reduce_now(const Reduction& reduction, StreamId stream) {
  const UnitPlace& unit = reduction.unit;
  std::byte* const slot = reduction.slot;
  const DType type = reduction.type;
  const CollectiveSpan span{.unit = unit.id,
                            .size_bytes = unit.payload_elements * size_of(type),
                            .step = reduction.step,
                            .detail = shard_optimizer() ? kTraceReduce : kTraceReduceAndGather};
  reductions_->run(span, stream, [&] {
    if (is_hybrid()) return reduce_in_group(unit, slot, type, stream);
    Collectives& all = reductions_->collectives();
    if (!shard_optimizer())
      return all.all_reduce(
          {.data = slot, .type = type, .element_count = unit.element_count, .subject = unit.name},
          stream);
    all.reduce_scatter({.target = slot + unit.shard_begin * size_of(type),
                        .target_type = type,
                        .source = slot,
                        .source_type = type,
                        .shard_elements = unit.shard_elements,
                        .subject = unit.name},
                       stream);
  });
}

// Every rank of the group adds its part within the group, and adds that to the other groups' sums
// of it. If gradients are not sharded, the parts are gathered again.
void Ranks::reduce_in_group(const UnitPlace& unit, std::byte* slot, DType type, StreamId stream) {
  Collectives& group = reductions_->collectives();
  const std::uint64_t elements = unit.element_count / group_;
  const Part part{.data = slot + rank_ % group_ * elements * size_of(type),
                  .element_count = elements};
  group.reduce_scatter({.target = partial_.data(),
                        .target_type = DType::kFp32,
                        .source = slot,
                        .source_type = type,
                        .shard_elements = elements,
                        .subject = unit.name},
                       stream);
  reduce_across(part, type, unit.name, stream);
  if (shard_optimizer()) return;
  group.all_gather({.target = slot,
                    .source = part.data,
                    .shard_bytes = elements * size_of(type),
                    .subject = unit.name},
                   stream);
}

void Ranks::reduce_across(const Part& part, DType type, std::string_view subject, StreamId stream) {
  const std::uint64_t elements = part.element_count / across_->rank_count();
  std::byte* const own = part.data + across_->rank() * elements * size_of(type);
  across_->reduce_scatter({.target = own,
                           .target_type = type,
                           .source = partial_.data(),
                           .source_type = DType::kFp32,
                           .shard_elements = elements,
                           .subject = subject},
                          stream);
  across_->all_gather({.target = part.data,
                       .source = own,
                       .shard_bytes = elements * size_of(type),
                       .subject = subject},
                      stream);
}

void Ranks::use_memory(std::span<std::byte> memory) {
  for (const auto& sequence : {gathers_.get(), resident_gathers_.get(), reductions_.get()})
    if (sequence != nullptr) sequence->collectives().use_memory(memory);
  if (across_ != nullptr) across_->use_memory(memory);
}

std::vector<std::string> Ranks::notes() const {
  std::vector<std::string> all;
  const auto add = [&all](const Collectives& collectives) {
    for (std::string& note : collectives.notes())
      if (std::ranges::find(all, note) == all.end()) all.push_back(std::move(note));
  };
  for (const auto& sequence : {gathers_.get(), resident_gathers_.get(), reductions_.get()})
    if (sequence != nullptr) add(sequence->collectives());
  if (across_ != nullptr) add(*across_);
  return all;
}

void Ranks::forget_memory() noexcept {
  for (const auto& sequence : {gathers_.get(), resident_gathers_.get(), reductions_.get()})
    if (sequence != nullptr) sequence->collectives().forget_memory();
  if (across_ != nullptr) across_->forget_memory();
}

void Ranks::on_failure(std::function<void(const Error&)> handler) {
  if (collectives_ != nullptr) collectives_->on_failure(std::move(handler));
}

}  // namespace sluice
