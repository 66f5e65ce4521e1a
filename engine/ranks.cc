#include "engine/ranks.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include <fmt/format.h>

#include "base/error.h"
#include "base/units.h"
#include "io/checksum.h"

namespace sluice {
namespace {

CollectiveSpan vote_span(std::uint64_t size_bytes) {
  return {.unit = UnitId{kTraceNone}, .size_bytes = size_bytes, .detail = kTraceVote};
}

}  // namespace

Ranks::Ranks(const Config::Sharding& sharding, Collectives* collectives, Device& device)
    : collectives_(collectives), device_(device), stage_(sharding.stage) {
  if (collectives == nullptr) return;
  rank_ = collectives->rank();
  count_ = collectives->rank_count();
  if (!are_several()) return;
  SLUICE_CHECK(!sharding.group_is_node, "whoever knows the hosts has set group_ranks");
  group_ = sharding.group_ranks == 0 ? count_ : sharding.group_ranks;
  if (count_ % group_ != 0)
    throw Error(ErrorCode::kConfig,
                fmt::format("sharding.group is {}, but {} ranks are not a multiple of that; choose "
                            "a divisor, or start other ranks",
                            group_, count_));
  std::vector<std::uint32_t> all(count_);
  std::iota(all.begin(), all.end(), 0u);
  const auto group = std::span(all).subspan(is_hybrid() ? rank_ / group_ * group_ : 0,
                                            is_hybrid() ? group_ : count_);
  for (auto* const sequence : {&gathers_, &resident_gathers_, &reductions_})
    *sequence = std::make_unique<RankSequence>(collectives->open(group), device);
  votes_ = std::make_unique<RankSequence>(collectives->open(all), device);
  if (is_hybrid()) {
    std::vector<std::uint32_t> peers;
    for (std::uint32_t rank = rank_ % group_; rank < count_; rank += group_) peers.push_back(rank);
    across_ = collectives->open(peers);
  }
  buffer_ = DeviceBuffer(device, kExchangeBytesMax, "votes of the ranks");
  stream_ = Stream(device, "votes");
}

Shard Ranks::shard() const {
  if (!shard_optimizer())
    return {.keeps_all_gradients = are_several(), .pieces = is_hybrid() ? count_ : 1};
  return {.index = rank_ % group_,
          .count = group_,
          .keeps_all_gradients = !shard_gradients(),
          .keeps_all_parameters = !shard_parameters(),
          .pieces = count_ / group_};
}

void Ranks::reserve(const Layout& layout) {
  if (!is_hybrid()) return;
  std::uint64_t elements_max = 0;
  for (const UnitPlace& unit : layout.units())
    if (!unit.is_frozen) elements_max = std::max(elements_max, unit.element_count / group_);
  partial_ = DeviceBuffer(device_, elements_max * sizeof(float), "gradients summed in a group");
}

void Ranks::check(const Config::Placement& choices) const {
  const bool is_elsewhere =
      choices.parameters == TierChoice::kHost || choices.parameters == TierChoice::kNvme;
  if (shard_parameters() && choices.parameters == TierChoice::kDevice)
    throw Error(
        ErrorCode::kConfig,
        "placement.parameters \"device\" with sharding.stage 3: each rank homes its shard in "
        "host memory or on storage, and units come together in the device window; choose "
        "auto, host or nvme, or stage 2 to keep all parameters on every device");
  if (shard_parameters() && choices.optimizer == TierChoice::kDevice)
    throw Error(ErrorCode::kConfig,
                "placement.optimizer \"device\" with sharding.stage 3: the device updates units "
                "whose parameters are at home there, and that stage keeps none there; choose auto, "
                "host or nvme, or stage 2");
  if (shard_optimizer() && !shard_parameters() && is_elsewhere)
    throw Error(
        ErrorCode::kConfig,
        fmt::format("placement.parameters \"{}\" with sharding.stage {}: that stage keeps all "
                    "parameters in every rank's device memory; choose stage 3, or device",
                    choices.parameters == TierChoice::kHost ? "host" : "nvme", stage_));
  if (are_several() && !shard_gradients() && choices.gradients == TierChoice::kNvme)
    throw Error(ErrorCode::kConfig,
                fmt::format("placement.gradients \"nvme\" with sharding.stage {}: that stage keeps "
                            "all gradients in every rank's memory; choose stage 2 or 3, or host or "
                            "device",
                            stage_));
}

std::vector<std::byte> Ranks::exchange(std::span<const std::byte> own, std::string_view subject) {
  std::vector<std::byte> all(own.size() * count_);
  if (!are_several()) {
    std::ranges::copy(own, all.begin());
    return all;
  }
  SLUICE_CHECK(all.size() <= kExchangeBytesMax, "ranks say little at a time");
  std::byte* const place = buffer_.data() + rank_ * own.size();
  device_.copy(place, own.data(), own.size(), stream_.id());
  votes_->all_gather(
      {.target = buffer_.data(), .source = place, .shard_bytes = own.size(), .subject = subject},
      vote_span(all.size()), stream_.id());
  device_.copy(all.data(), buffer_.data(), all.size(), stream_.id());
  device_.synchronize(stream_.id());
  return all;
}

void Ranks::broadcast(std::span<std::byte> data, std::uint32_t root, std::string_view subject) {
  if (!are_several()) return;
  for (std::uint64_t begin = 0; begin < data.size(); begin += kExchangeBytesMax) {
    const auto piece = data.subspan(begin, std::min(kExchangeBytesMax, data.size() - begin));
    if (root == rank_) device_.copy(buffer_.data(), piece.data(), piece.size(), stream_.id());
    votes_->run(vote_span(piece.size()), stream_.id(), [&] {
      votes_->collectives().broadcast(
          {.data = buffer_.data(), .size_bytes = piece.size(), .root = root, .subject = subject},
          stream_.id());
    });
    if (root != rank_) device_.copy(piece.data(), buffer_.data(), piece.size(), stream_.id());
    device_.synchronize(stream_.id());
  }
}

void Ranks::require_agreement(std::string_view description, std::string_view subject) {
  const std::uint64_t own = checksum(std::as_bytes(std::span(description)));
  const std::vector<std::byte> all = exchange(std::as_bytes(std::span(&own, 1)), subject);
  std::vector<std::uint32_t> others;
  for (std::uint32_t rank = 1; rank < count_; ++rank) {
    if (std::memcmp(all.data(), all.data() + rank * sizeof own, sizeof own) != 0)
      others.push_back(rank);
  }
  if (others.empty()) return;
  throw Error(ErrorCode::kRanks,
              fmt::format("rank {} of {}: {} differs between rank 0 and rank {}; start every rank "
                          "with the same config, model and memory.device",
                          rank_, count_, subject, fmt::join(others, ", ")));
}

void Ranks::reduce(const UnitPlace& unit, std::byte* slot, DType type, std::uint64_t step,
                   StreamId stream) {
  const std::uint64_t payload_bytes = unit.payload_elements * size_of(type);
  traffic_.reduced_bytes += payload_bytes;
  if (!shard_optimizer()) traffic_.gathered_bytes += payload_bytes;
  const CollectiveSpan span{.unit = unit.id,
                            .size_bytes = payload_bytes,
                            .step = step,
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

// Every rank of the group adds its part over the group, and adds that to what the other groups have
// of it. Without sharing, the parts come together again.
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
  traffic_.crossed_bytes += unit.payload_elements * (sizeof(float) + size_of(type)) / group_;
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

void Ranks::forget_memory() noexcept {
  for (const auto& sequence : {gathers_.get(), resident_gathers_.get(), reductions_.get()})
    if (sequence != nullptr) sequence->collectives().forget_memory();
  if (across_ != nullptr) across_->forget_memory();
}

void Ranks::on_failure(std::function<void(const Error&)> handler) {
  if (collectives_ != nullptr) collectives_->on_failure(std::move(handler));
}

void Ranks::abort(std::string_view reason) noexcept {
  if (are_several()) collectives_->abort(reason);
}

}  // namespace sluice
