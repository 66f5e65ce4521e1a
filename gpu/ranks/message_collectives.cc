#include "gpu/ranks/message_collectives.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "gpu/ranks/host_exchange.h"
#include "gpu/ranks/integer_reduction.h"
#include "gpu/ranks/message_thread.h"
#include "gpu/ranks/rank_reduction.h"

namespace sluice {
namespace {

// One message of a gather or broadcast: large enough for MPI's best rate, and below MPI's 2 GiB.
constexpr std::uint64_t kPieceBytes = 8_MiB;
// A rank receives this much from all others for one step of a reduction, while a second step is
// under way: small enough that the sum finds it in the cache.
constexpr std::uint64_t kReduceStepBytes = 1_MiB;
constexpr std::uint64_t kReduceSteps = 2;
static_assert(kReduceStepBytes >= HostExchange::kStagingBytes);
// From this many bytes on, sent and received, messages move on a thread of their own while the
// operation sums and copies: fewer bytes move in the time that it takes to wake a thread. A little
// less than a full step of a reduction, which runs beside the sum of the step before.
constexpr std::uint64_t kLargeBytes = 2 * kReduceStepBytes * 15 / 16;
constexpr int kTagsPerSequence = 256;
constexpr std::string_view kOpening = "the opening of collectives";

class MessageCollectives final : public HostCollectives {
 public:
  MessageCollectives(MessageThread& messages, const HostCollectivesOptions& options,
                     HostDevice& device, std::shared_ptr<RankFailure> failure, RankGroup group,
                     std::shared_ptr<int> opened)
      : HostCollectives(device, std::move(failure), std::move(group)),
        messages_(messages),
        options_(options),
        opened_(std::move(opened)),
        place_((*opened_)++),
        first_tag_(place_ * kTagsPerSequence),
        integer_rounds_(integer_rounds(rank(), rank_count(), options_.direct_ranks_max)) {
    SLUICE_CHECK(first_tag_ <= messages_.tag_max() - kTagsPerSequence,
                 "there are tags for all sequences");
    for (auto& staging : staging_)
      staging = AlignedBuffer(staging_bytes(), "buffer for received messages");
    if (is_on_one_host())
      host_.emplace(messages_.neighbors(), options_, *this->failure(), this->group(),
                    static_cast<std::uint32_t>(place_),
                    std::span(staging_[0].data(), HostExchange::kStagingBytes));
  }

  std::string_view name() const override { return messages_.kind(); }

  // The ranks may have opened unequal numbers on other objects.
  std::unique_ptr<Collectives> open(std::span<const std::uint32_t> ranks) override {
    *opened_ = static_cast<int>(agree_on_maximum(static_cast<std::uint64_t>(*opened_), kOpening));
    return std::make_unique<MessageCollectives>(messages_, options_, device(), failure(),
                                                group().subgroup(ranks), opened_);
  }

  void abort(std::string_view) noexcept override { messages_.abort(); }

 private:
  // The messages of one step of an operation. Tags repeat after 256 operations; far fewer are under
  // way at a time.
  class Exchange {
   public:
    Exchange(const MessageCollectives& owner, std::uint64_t sequence)
        : owner_(owner),
          tag_(owner.first_tag_ + static_cast<int>(sequence % kTagsPerSequence)),
          batch_(std::make_shared<MessageBatch>()) {}

    void send(std::uint32_t rank, const std::byte* data, std::uint64_t size_bytes) {
      add(rank, const_cast<std::byte*>(data), size_bytes, /*is_send=*/true);
    }
    void receive(std::uint32_t rank, std::byte* data, std::uint64_t size_bytes) {
      add(rank, data, size_bytes, /*is_send=*/false);
    }
    void start() {
      batch_->is_large = size_bytes_ >= kLargeBytes;
      owner_.messages_.start(batch_);
    }
    void wait(std::string_view kind, std::string_view subject) {
      owner_.messages_.wait(*batch_, {.timeout_s = owner_.options_.timeout_s,
                                      .kind = kind,
                                      .subject = subject,
                                      .on_wait = &owner_.options_.on_wait});
    }

   private:
    void add(std::uint32_t rank, std::byte* data, std::uint64_t size_bytes, bool is_send) {
      size_bytes_ += size_bytes;
      for (std::uint64_t at = 0; at < size_bytes; at += kPieceBytes)
        batch_->messages.push_back({.data = data + at,
                                    .size_bytes = std::min(kPieceBytes, size_bytes - at),
                                    .peer = owner_.group().members[rank],
                                    .tag = tag_,
                                    .is_send = is_send});
    }

    const MessageCollectives& owner_;
    int tag_;
    std::uint64_t size_bytes_ = 0;
    std::shared_ptr<MessageBatch> batch_;
  };

  // Whether there is a place for it in the segment that the ranks of this host share.
  bool is_on_one_host() const {
    return rank_count() > 1 && rank_count() <= HostExchange::kRanksMax &&
           static_cast<std::uint32_t>(place_) < HostNeighbors::kPlaces &&
           options_.path != RankPath::kMessages && messages_.neighbors().include(group().members);
  }

  // Runs without messages if all ranks are on this host.
  template <class Operation>
  bool is_done_on_host(const Operation& operation) {
    if (host_) host_->run(operation);
    return host_.has_value();
  }

  void end_waits(const std::string& failure) override { messages_.fail(failure); }

  // Visits every rank but this one. Each begins with its successor, so that not all talk to one.
  template <class Body>
  void for_each_peer(const Body& body) const {
    for (std::uint32_t i = 1; i < rank_count(); ++i) body((rank() + i) % rank_count());
  }

  void run(const AllGather& gather, std::uint64_t sequence) override {
    if (is_done_on_host(gather)) return;
    Exchange exchange(*this, sequence);
    for_each_peer([&](std::uint32_t peer) {
      exchange.receive(peer, gather.target + peer * gather.shard_bytes, gather.shard_bytes);
    });
    for_each_peer(
        [&](std::uint32_t peer) { exchange.send(peer, gather.source, gather.shard_bytes); });
    exchange.start();
    std::byte* const own = gather.target + rank() * gather.shard_bytes;
    if (own != gather.source && gather.shard_bytes != 0)
      std::memcpy(own, gather.source, gather.shard_bytes);
    exchange.wait("all_gather", gather.subject);
  }

  // With very many ranks, the bytes of the smallest step.
  std::uint64_t staging_bytes() const {
    if (rank_count() == 1) return 0;
    constexpr std::uint64_t kLeastBytes = RankReduction::kElementsAlign * sizeof(float);
    return std::max(kReduceStepBytes, (rank_count() - 1) * kLeastBytes);
  }
  std::uint64_t step_elements(const RankReduction& reduction) const {
    const std::uint64_t bytes = staging_bytes() / (rank_count() - 1);
    const std::uint64_t elements = bytes / size_of(reduction.source_type);
    return elements / RankReduction::kElementsAlign * RankReduction::kElementsAlign;
  }

  void reduce(const RankReduction& reduction, std::uint64_t sequence) {
    if (rank_count() == 1) return sum_step(reduction, reduction.range(0), nullptr, 0);
    const std::uint64_t step = step_elements(reduction);
    const std::uint64_t steps = div_ceil(reduction.share, step);
    std::vector<Exchange> exchanges;  // the last ones are under way
    const auto start = [&](std::uint64_t i) {
      exchanges.emplace_back(*this, sequence);
      const std::uint64_t element_bytes = size_of(reduction.source_type);
      const ElementRange own = reduction.piece(rank(), i, step);
      std::byte* staging = staging_[i % kReduceSteps].data();
      for_each_peer([&](std::uint32_t peer) {
        const std::uint32_t place = peer < rank() ? peer : peer - 1;
        exchanges.back().receive(peer, staging + place * step * element_bytes,
                                 reduction.source_bytes(own));
      });
      for_each_peer([&](std::uint32_t peer) {
        const ElementRange theirs = reduction.piece(peer, i, step);
        exchanges.back().send(peer, reduction.source_of(theirs), reduction.source_bytes(theirs));
      });
      exchanges.back().start();
    };
    exchanges.reserve(steps);
    for (std::uint64_t i = 0; i < std::min(steps, kReduceSteps); ++i) start(i);
    for (std::uint64_t i = 0; i < steps; ++i) {
      exchanges[i].wait(reduction.kind, reduction.subject);
      sum_step(reduction, reduction.piece(rank(), i, step), staging_[i % kReduceSteps].data(),
               step);
      if (i + kReduceSteps < steps) start(i + kReduceSteps);
    }
  }

  void sum_step(const RankReduction& reduction, ElementRange piece, const std::byte* staging,
                std::uint64_t step) const {
    if (piece.count() == 0) return;
    std::vector<const void*> sources;
    for (std::uint32_t i = 0; i < rank_count(); ++i) {
      const std::uint32_t place = i < rank() ? i : i - 1;
      sources.push_back(i == rank() ? reduction.source_of(piece)
                                    : staging + place * step * size_of(reduction.source_type));
    }
    options_.sum({.target = reduction.target_of(piece, rank()),
                  .target_type = reduction.target_type,
                  .sources = sources,
                  .source_type = reduction.source_type,
                  .element_count = piece.count()});
  }

  void run(const ReduceScatter& operation, std::uint64_t sequence) override {
    if (is_done_on_host(operation)) return;
    reduce(reduction_of(operation, rank_count()), sequence);
  }

  // Each rank adds its share in place, then sends it to the others.
  void run(const AllReduce& operation, std::uint64_t sequence) override {
    if (is_done_on_host(operation)) return;
    const RankReduction reduction = reduction_of(operation, rank(), rank_count());
    reduce(reduction, sequence);
    Exchange exchange(*this, sequence);
    for_each_peer([&](std::uint32_t peer) {
      const ElementRange theirs = reduction.range(peer);
      exchange.receive(peer, operation.data + theirs.begin * size_of(operation.type),
                       reduction.source_bytes(theirs));
    });
    for_each_peer([&](std::uint32_t peer) {
      exchange.send(peer, reduction.target, reduction.source_bytes(reduction.range(rank())));
    });
    exchange.start();
    exchange.wait("all_reduce", operation.subject);
  }

  void run(const AllReduceIntegers& operation, std::uint64_t sequence) override {
    if (is_done_on_host(operation)) return;
    const std::uint64_t sources_max = std::min(rank_count() - 1, options_.direct_ranks_max);
    const std::uint64_t words_max =
        kReduceStepBytes / sizeof(std::uint64_t) / std::max<std::uint64_t>(sources_max, 1);
    for (std::uint64_t first = 0; first < operation.count(); first += words_max)
      reduce_words(operation, first, std::min(words_max, operation.count() - first), sequence);
  }

  void reduce_words(const AllReduceIntegers& operation, std::uint64_t first, std::uint64_t count,
                    std::uint64_t sequence) {
    const std::uint64_t size_bytes = count * sizeof(std::uint64_t);
    std::byte* const own = operation.data + first * sizeof(std::uint64_t);
    for (const IntegerRound& round : integer_rounds_) {
      Exchange exchange(*this, sequence);
      std::byte* staging = round.replaces ? own : staging_[0].data();
      for (std::size_t i = 0; i < round.sources.size(); ++i)
        exchange.receive(round.sources[i], staging + i * size_bytes, size_bytes);
      for (const std::uint32_t target : round.targets) exchange.send(target, own, size_bytes);
      exchange.start();
      exchange.wait("all_reduce_integers", operation.subject);
      for (std::size_t i = 0; i < round.sources.size() && !round.replaces; ++i)
        combine_integers(operation, first, count, staging + i * size_bytes, own);
    }
  }

  void run(const Broadcast& broadcast, std::uint64_t sequence) override {
    SLUICE_CHECK(broadcast.root < rank_count(), "the root is one of the ranks");
    if (is_done_on_host(broadcast)) return;
    Exchange exchange(*this, sequence);
    if (rank() == broadcast.root) {
      for_each_peer(
          [&](std::uint32_t peer) { exchange.send(peer, broadcast.data, broadcast.size_bytes); });
    } else {
      exchange.receive(broadcast.root, broadcast.data, broadcast.size_bytes);
    }
    exchange.start();
    exchange.wait("broadcast", broadcast.subject);
  }

  void run(const Barrier& barrier, std::uint64_t sequence) override {
    if (is_done_on_host(barrier)) return;
    Exchange exchange(*this, sequence);
    std::vector<std::byte> bytes(rank_count());
    for_each_peer([&](std::uint32_t peer) { exchange.receive(peer, &bytes[peer], 1); });
    for_each_peer([&](std::uint32_t peer) { exchange.send(peer, &bytes[rank()], 1); });
    exchange.start();
    exchange.wait("barrier", barrier.subject);
  }

  // Constant after construction.
  MessageThread& messages_;
  const HostCollectivesOptions options_;
  std::shared_ptr<int> opened_;  // by this rank of the world, so far
  int place_;                    // the place of this sequence among those
  int first_tag_;
  std::vector<IntegerRound> integer_rounds_;

  std::array<AlignedBuffer, kReduceSteps> staging_;  // for the running operation
  std::optional<HostExchange> host_;                 // if all ranks are on this host
};

}  // namespace

MessageWorld::MessageWorld(const HostCollectivesOptions& options, Connection connection)
    : options_(options) {
  SLUICE_CHECK(options.sum != nullptr && options.timeout_s >= 0.1,
               "a world has a sum and a timeout");
  messages_ =
      std::make_unique<MessageThread>(MessageThread::Options{.connection = std::move(connection),
                                                             .timeout_s = options.timeout_s,
                                                             .on_wait = options.on_wait});
  try {
    messages_->await_open();
  } catch (...) {
    if (!messages_->has_ended()) (void)messages_.release();  // a thread is still inside it
    throw;
  }
}

MessageWorld::~MessageWorld() {
  try {
    leave();
  } catch (const Error&) {  // a caller that wants the error has called leave()
  }
}

void MessageWorld::leave() {
  if (messages_ == nullptr) return;
  const std::string late = messages_->await_end();
  if (late.empty()) return messages_.reset();
  (void)messages_.release();  // a thread is still inside it
  throw Error(ErrorCode::kRanks, late);
}

std::uint32_t MessageWorld::rank() const {
  return messages_->rank();
}
std::uint32_t MessageWorld::rank_count() const {
  return messages_->rank_count();
}
std::string MessageWorld::version() const {
  return messages_->version();
}
std::uint32_t MessageWorld::neighbor_count() const {
  std::uint32_t count = 0;
  for (std::uint32_t other = 0; other < rank_count(); ++other) {
    const std::uint32_t ranks[] = {other};
    if (other != rank() && messages_->neighbors().include(ranks)) ++count;
  }
  return count;
}

void MessageWorld::abort() noexcept {
  if (messages_ != nullptr) messages_->abort();
}

std::unique_ptr<Collectives> MessageWorld::join(HostDevice& device) {
  return std::make_unique<MessageCollectives>(
      *messages_, options_, device, std::make_shared<RankFailure>(),
      RankGroup::world(rank(), rank_count()), std::make_shared<int>(0));
}

}  // namespace sluice
