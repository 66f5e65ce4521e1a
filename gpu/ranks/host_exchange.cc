#include "gpu/ranks/host_exchange.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "gpu/ranks/integer_reduction.h"
#include "gpu/ranks/operation_hash.h"

namespace sluice {
namespace {

// The most that each other rank takes out of a slot. More data is faster read where it lies.
constexpr std::uint64_t kSlotShareBytes = 16_KiB;
void copy_bytes(std::byte* target, const std::byte* source, std::uint64_t size_bytes) {
  if (size_bytes != 0 && target != source) std::memcpy(target, source, size_bytes);
}

}  // namespace

HostExchange::HostExchange(const HostNeighbors& neighbors, const HostCollectivesOptions& options,
                           const RankFailure& failure, RankGroup group, std::uint32_t place,
                           std::span<std::byte> staging)
    : neighbors_(neighbors),
      options_(options),
      failure_(failure),
      group_(std::move(group)),
      place_(place),
      staging_(staging),
      sources_(group_.count()) {
  SLUICE_CHECK(group_.count() <= kRanksMax, "so many ranks share a host");
  for (const std::uint32_t member : group_.members)
    signals_.push_back(&neighbors_.signals(member, place_));
}

template <class Body>
void HostExchange::attempt(std::string_view kind, std::string_view subject, const Shape& shape,
                           const Body& body) {
  operation_ = operation_hash(kind, shape.size, shape.type);
  how_ = {.timeout_s = options_.timeout_s,
          .kind = kind,
          .subject = subject,
          .on_wait = &options_.on_wait};
  begin_step();
  try {
    body();
  } catch (...) {
    retract();
    throw;
  }
}

// Relaxed: the step is published later, or by a later step.
void HostExchange::begin_step() {
  ++step_;
  signals_[group_.rank]->operations[step_ % RankSignals::kStepsKept].store(
      step_ << 32 | operation_, std::memory_order_relaxed);
}

// Comes after `peer` has published this step, or has failed.
void HostExchange::require_same_operation(std::uint32_t peer) const {
  const auto& kept = signals_[peer]->operations[step_ % RankSignals::kStepsKept];
  const std::uint64_t word = kept.load(std::memory_order_relaxed);
  if (word >> 32 != (step_ & UINT32_MAX) || (word & UINT32_MAX) == operation_) return;
  throw Error(
      ErrorCode::kRanks,
      fmt::format("rank {} runs {} of \"{}\", and rank {} another operation or one of another "
                  "size: the ranks disagree; let all make the same calls",
                  group_.members[group_.rank], how_.kind, how_.subject, group_.members[peer]));
}

// Visits every rank but this one. Each begins with its successor, so that not all read from one.
template <class Body>
void HostExchange::for_each_peer(const Body& body) const {
  const auto count = group_.count();
  for (std::uint32_t i = 1; i < count; ++i) body((group_.rank + i) % count);
}

// `taken_bytes`: what each other rank takes, out of `size_bytes`.
bool HostExchange::uses_slots(std::uint64_t taken_bytes, std::uint64_t size_bytes) const {
  return options_.path != RankPath::kReading && taken_bytes <= kSlotShareBytes &&
         size_bytes <= HostNeighbors::kSlotBytes;
}

// Visits ready ranks first: on a host with fewer cores than ranks, a rank would otherwise give its
// core away although it has something to do.
template <class Body>
void HostExchange::for_each_published(const Body& body) {
  is_done_.assign(group_.count(), false);
  for_each_peer([&](std::uint32_t peer) {
    if (!has_reached(peer, &RankSignals::published, step_)) return;
    require_same_operation(peer);
    body(peer);
    is_done_[peer] = true;
  });
  for_each_peer([&](std::uint32_t peer) {
    if (is_done_[peer]) return;
    await(peer, &RankSignals::published, step_);
    body(peer);
  });
}

void HostExchange::run(const AllGather& gather) {
  attempt("all_gather", gather.subject, {.size = gather.shard_bytes}, [&] {
    uses_slots(gather.shard_bytes, gather.shard_bytes) ? gather_by_slots(gather)
                                                       : gather_by_reading(gather);
  });
}

void HostExchange::gather_by_slots(const AllGather& gather) {
  std::byte* const slot = begin_slot_step();
  copy_bytes(slot, gather.source, gather.shard_bytes);
  publish();
  copy_bytes(gather.target + group_.rank * gather.shard_bytes, gather.source, gather.shard_bytes);
  for_each_published([&](std::uint32_t peer) {
    copy_bytes(gather.target + peer * gather.shard_bytes, slot_of(peer), gather.shard_bytes);
  });
  consume();
}

void HostExchange::gather_by_reading(const AllGather& gather) {
  publish(gather.source);
  for_each_published([&](std::uint32_t peer) {
    read(peer, 0, gather.target + peer * gather.shard_bytes, gather.shard_bytes);
  });
  consume();
  copy_bytes(gather.target + group_.rank * gather.shard_bytes, gather.source, gather.shard_bytes);
  await_all(&RankSignals::consumed, step_);
}

void HostExchange::run(const ReduceScatter& operation) {
  const auto ranks = group_.count();
  const RankReduction reduction = reduction_of(operation, ranks);
  const auto types = static_cast<std::uint32_t>(operation.source_type) << 8 |
                     static_cast<std::uint32_t>(operation.target_type);
  const Shape shape{.size = operation.shard_elements, .type = types};
  attempt(reduction.kind, reduction.subject, shape, [&] {
    const std::uint64_t share_bytes = reduction.share * size_of(reduction.source_type);
    if (uses_slots(share_bytes, (ranks - 1) * share_bytes)) return reduce_by_slots(reduction);
    reduce_by_reading(reduction);
    await_all(&RankSignals::consumed, step_);
  });
}

// A slot holds the shares in order, without the rank's own.
void HostExchange::reduce_by_slots(const RankReduction& reduction) {
  const std::uint64_t share_bytes = reduction.share * size_of(reduction.source_type);
  const auto place = [&](std::uint32_t share, std::uint32_t slot_owner) {
    return (share < slot_owner ? share : share - 1) * share_bytes;
  };
  std::byte* const slot = begin_slot_step();
  for_each_peer([&](std::uint32_t peer) {
    const ElementRange theirs = reduction.range(peer);
    copy_bytes(slot + place(peer, group_.rank), reduction.source_of(theirs),
               reduction.source_bytes(theirs));
  });
  publish();
  for_each_peer([&](std::uint32_t peer) {
    await(peer, &RankSignals::published, step_);
    sources_[peer] = slot_of(peer) + place(group_.rank, peer);
  });
  sum(reduction, reduction.range(group_.rank), reduction.target);
  consume();
}

void HostExchange::reduce_by_reading(const RankReduction& reduction) {
  const std::uint64_t element_bytes = size_of(reduction.source_type);
  const std::uint64_t elements = kStagingBytes / (group_.count() - 1) / element_bytes;
  const std::uint64_t step =
      elements / RankReduction::kElementsAlign * RankReduction::kElementsAlign;
  publish(reduction.source);
  for (std::uint64_t i = 0; i * step < reduction.share; ++i) {
    const ElementRange piece = reduction.piece(group_.rank, i, step);
    for_each_peer([&](std::uint32_t peer) {
      std::byte* const staged =
          staging_.data() + (peer < group_.rank ? peer : peer - 1) * step * element_bytes;
      read(peer, piece.begin * element_bytes, staged, reduction.source_bytes(piece));
      sources_[peer] = staged;
    });
    sum(reduction, piece, reduction.target_of(piece, group_.rank));
  }
  consume();
}

void HostExchange::sum(const RankReduction& reduction, ElementRange piece, std::byte* target) {
  if (piece.count() == 0) return;
  sources_[group_.rank] = reduction.source_of(piece);
  options_.sum({.target = target,
                .target_type = reduction.target_type,
                .sources = sources_,
                .source_type = reduction.source_type,
                .element_count = piece.count()});
}

void HostExchange::run(const AllReduce& operation) {
  const Shape shape{.size = operation.element_count,
                    .type = static_cast<std::uint32_t>(operation.type)};
  attempt("all_reduce", operation.subject, shape, [&] {
    const std::uint64_t size_bytes = operation.element_count * size_of(operation.type);
    uses_slots(size_bytes, size_bytes) ? all_reduce_by_slots(operation)
                                       : all_reduce_by_reading(operation);
  });
}

// There is so little data that every rank adds all of it: one step instead of two.
void HostExchange::all_reduce_by_slots(const AllReduce& operation) {
  std::byte* const slot = begin_slot_step();
  copy_bytes(slot, operation.data, operation.element_count * size_of(operation.type));
  publish();
  for_each_peer([&](std::uint32_t peer) {
    await(peer, &RankSignals::published, step_);
    sources_[peer] = slot_of(peer);
  });
  sum(reduction_of(operation, group_.rank, group_.count()),
      {.begin = 0, .end = operation.element_count}, operation.data);
  consume();
}

// A rank that publishes its sums has finished reading, so its share may then be overwritten here.
void HostExchange::all_reduce_by_reading(const AllReduce& operation) {
  const RankReduction reduction = reduction_of(operation, group_.rank, group_.count());
  reduce_by_reading(reduction);
  begin_step();
  publish(operation.data);
  for_each_published([&](std::uint32_t peer) {
    const ElementRange theirs = reduction.range(peer);
    const std::uint64_t begin = theirs.begin * size_of(operation.type);
    read(peer, begin, operation.data + begin, reduction.source_bytes(theirs));
  });
  consume();
  await_all(&RankSignals::consumed, step_);
}

// There are usually few enough words for one slot; otherwise one slot follows the other.
void HostExchange::run(const AllReduceIntegers& operation) {
  const Shape shape{.size = operation.count(),
                    .type = static_cast<std::uint32_t>(operation.sum_count)};
  attempt("all_reduce_integers", operation.subject, shape, [&] {
    constexpr std::uint64_t kSlotWords = HostNeighbors::kSlotBytes / sizeof(std::uint64_t);
    std::uint64_t first = 0;
    do {
      if (first != 0) begin_step();
      const std::uint64_t words = std::min(kSlotWords, operation.count() - first);
      std::byte* const own = operation.data + first * sizeof(std::uint64_t);
      copy_bytes(begin_slot_step(), own, words * sizeof(std::uint64_t));
      publish();
      for_each_published([&](std::uint32_t peer) {
        combine_integers(operation, first, words, slot_of(peer), own);
      });
      consume();
      first += words;
    } while (first < operation.count());
  });
}

void HostExchange::run(const Broadcast& broadcast) {
  attempt("broadcast", broadcast.subject, {.size = broadcast.size_bytes, .type = broadcast.root},
          [&] {
            const bool is_small = uses_slots(broadcast.size_bytes, broadcast.size_bytes);
            if (group_.rank != broadcast.root) {
              if (is_small) {
                await(broadcast.root, &RankSignals::published, step_);
                copy_bytes(broadcast.data, slot_of(broadcast.root), broadcast.size_bytes);
              } else {
                read(broadcast.root, 0, broadcast.data, broadcast.size_bytes);
              }
              return consume();
            }
            if (is_small) copy_bytes(begin_slot_step(), broadcast.data, broadcast.size_bytes);
            publish(broadcast.data);
            consume();
            if (!is_small) await_all(&RankSignals::consumed, step_);
          });
}

void HostExchange::run(const Barrier& barrier) {
  attempt("barrier", barrier.subject, {}, [&] {
    publish();
    await_all(&RankSignals::published, step_);
    consume();
  });
}

std::byte* HostExchange::slot_of(std::uint32_t rank) const {
  return neighbors_.slot(group_.members[rank], place_, step_);
}

// All ranks have read the slot's data of two steps ago.
std::byte* HostExchange::begin_slot_step() {
  if (step_ > 2) await_all(&RankSignals::consumed, step_ - 2);
  return slot_of(group_.rank);
}

// Release: a rank that sees the step sees the address and the data, in a slot or in memory.
void HostExchange::publish(const std::byte* data) {
  signals_[group_.rank]->address.store(reinterpret_cast<std::uint64_t>(data),
                                       std::memory_order_relaxed);
  signals_[group_.rank]->published.store(step_, std::memory_order_release);
}

// Release: the reading has ended before another rank may change the data.
void HostExchange::consume() {
  signals_[group_.rank]->consumed.store(step_, std::memory_order_release);
}

// An exchange and not a store, so that no later change of the data comes before it. A reader checks
// again after the system call that has copied the data.
void HostExchange::retract() {
  signals_[group_.rank]->failed.store(1, std::memory_order_release);
  signals_[group_.rank]->consumed.store(0, std::memory_order_relaxed);
  signals_[group_.rank]->published.exchange(0);
}

bool HostExchange::has_reached(std::uint32_t peer, Counter counter, std::uint64_t step) const {
  return (signals_[peer]->*counter).load(std::memory_order_acquire) >= step;
}

// If a rank fails meanwhile, the bytes copied from it are not data: it first takes back what it has
// published. If its process has ended, the reader does so, and the rank has not answered.
void HostExchange::read(std::uint32_t peer, std::uint64_t offset, std::byte* target,
                        std::uint64_t size_bytes) {
  await(peer, &RankSignals::published, step_);
  const std::uint64_t address = signals_[peer]->address.load(std::memory_order_relaxed) + offset;
  const int error = neighbors_.read(group_.members[peer], address, target, size_bytes);
  if (error == ESRCH) signals_[peer]->published.store(0, std::memory_order_relaxed);
  await(peer, &RankSignals::published, step_);
  if (error == 0) return;
  throw Error(ErrorCode::kRanks,
              fmt::format("rank {} cannot read the memory of rank {} in {} of \"{}\": {}",
                          group_.members[group_.rank], group_.members[peer], how_.kind,
                          how_.subject, errno_text(error)));
}

void HostExchange::await_all(Counter counter, std::uint64_t step) {
  for_each_peer([&](std::uint32_t peer) { await(peer, counter, step); });
}

}  // namespace sluice
