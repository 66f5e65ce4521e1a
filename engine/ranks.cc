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
  std::vector<std::uint32_t> all(count_);
  std::iota(all.begin(), all.end(), 0u);
  for (auto* const sequence : {&gathers_, &resident_gathers_, &reductions_, &votes_})
    *sequence = std::make_unique<RankSequence>(collectives->open(all), device);
  buffer_ = DeviceBuffer(device, kExchangeBytesMax, "votes of the ranks");
  stream_ = Stream(device, "votes");
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
  if (shard_optimizer() && !shard_parameters() && is_elsewhere)
    throw Error(
        ErrorCode::kConfig,
        fmt::format("placement.parameters \"{}\" with sharding.stage {}: that stage keeps all "
                    "parameters in every rank's device memory; choose stage 3, or device",
                    choices.parameters == TierChoice::kHost ? "host" : "nvme", stage_));
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

void Ranks::use_memory(std::span<std::byte> memory) {
  for (const auto& sequence : {gathers_.get(), resident_gathers_.get(), reductions_.get()})
    if (sequence != nullptr) sequence->collectives().use_memory(memory);
}

void Ranks::forget_memory() noexcept {
  for (const auto& sequence : {gathers_.get(), resident_gathers_.get(), reductions_.get()})
    if (sequence != nullptr) sequence->collectives().forget_memory();
}

void Ranks::on_failure(std::function<void(const Error&)> handler) {
  if (collectives_ != nullptr) collectives_->on_failure(std::move(handler));
}

void Ranks::abort(std::string_view reason) noexcept {
  if (are_several()) collectives_->abort(reason);
}

}  // namespace sluice
