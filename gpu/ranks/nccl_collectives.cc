#include "gpu/ranks/nccl_collectives.h"

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "gpu/cuda/kernel_list.h"
#include "gpu/ranks/exchanged_sum.h"
#include "gpu/ranks/nccl_caller.h"
#include "gpu/ranks/nccl_watch.h"
#include "gpu/ranks/reduction_steps.h"

namespace sluice {
namespace {

// The objects that all sequences of a rank share.
struct Common {
  CudaDevice& device;
  const NcclReduction reduction;
  const SumLauncher sum;
  const std::shared_ptr<RankFailure> failure;
  NcclWatch watch;
  NcclCaller caller;

  Common(CudaDevice& of_device, const NcclOptions& options)
      : device(of_device),
        reduction(options.reduction),
        sum(make_cuda_sum(of_device)),
        failure(std::make_shared<RankFailure>()),
        watch(of_device, failure, {.wait = options.timeout_s, .abort = options.abort_s}) {}
};

// Lets the sums of a reduction run beside its exchanges.
struct Overlap {
  explicit Overlap(CudaDevice& device)
      : sums(device, "sums over the ranks", StreamPriority::kHigh),
        received{Event(device), Event(device)},
        added{Event(device), Event(device)} {}

  Stream sums;
  // By half of the staging memory.
  std::array<Event, 2> received;
  std::array<Event, 2> added;
};

DeviceBuffer staging_buffer(Device& device, std::uint64_t size_bytes = kStagingBytesMin) {
  return {device, size_bytes, "NCCL receive buffer"};
}

class NcclCollectives final : public Collectives {
 public:
  NcclCollectives(std::shared_ptr<Common> common, std::unique_ptr<NcclCommunicator> communicator,
                  DeviceBuffer staging, std::uint32_t rank, std::uint32_t rank_count)
      : common_(std::move(common)),
        communicator_(std::move(communicator)),
        rank_(rank),
        rank_count_(rank_count),
        staging_(std::move(staging)) {
    common_->watch.add(*communicator_);
    try {
      meet();
    } catch (...) {
      common_->watch.remove(*communicator_);
      throw;
    }
  }
  ~NcclCollectives() override {
    common_->caller.drain();
    common_->watch.remove(*communicator_);
  }

  std::string_view name() const override { return "nccl"; }
  std::uint32_t rank() const override { return rank_; }
  std::uint32_t rank_count() const override { return rank_count_; }
  const Device* memory_device() const override { return &common_->device; }

  void all_gather(const AllGather& gather, StreamId stream) override {
    if (gather.shard_bytes == 0) return;
    enqueue("all_gather", gather.subject, stream, [&](void* native) {
      communicator_->all_gather(gather.target, gather.source, gather.shard_bytes, native);
    });
  }

  void reduce_scatter(const ReduceScatter& reduce, StreamId stream) override {
    if (reduce.shard_elements == 0) return;
    enqueue("reduce_scatter", reduce.subject, stream, [&](void* native) {
      if (is_plain(reduce.source_type, reduce.target_type))
        return communicator_->reduce_scatter(reduce.target, reduce.source, reduce.source_type,
                                             reduce.shard_elements, native);
      reduce_exactly({.source = reduce.source,
                      .source_type = reduce.source_type,
                      .target = reduce.target,
                      .target_type = reduce.target_type,
                      .share = reduce.shard_elements,
                      .count = reduce.shard_elements * rank_count_},
                     stream);
    });
  }

  // Each rank adds its share in place, then sends it to the others.
  void all_reduce(const AllReduce& reduce, StreamId stream) override {
    if (reduce.element_count == 0) return;
    enqueue("all_reduce", reduce.subject, stream, [&](void* native) {
      if (is_plain(reduce.type, reduce.type))
        return communicator_->all_reduce(reduce.data, reduce.type, reduce.element_count, native);
      Reduction reduction{
          .source = reduce.data,
          .source_type = reduce.type,
          .target_type = reduce.type,
          .share = align_up(div_ceil(reduce.element_count, rank_count_), kPieceAlignElements),
          .count = reduce.element_count};
      const std::uint64_t element_bytes = size_of(reduce.type);
      const auto place = [&](std::uint32_t of_rank) {
        return reduce.data + reduction.range(of_rank).begin * element_bytes;
      };
      const auto size_bytes = [&](std::uint32_t of_rank) {
        return reduction.range(of_rank).count() * element_bytes;
      };
      reduction.target = place(rank_);
      reduce_exactly(reduction, stream);
      Messages messages;
      for_each_peer([&](std::uint32_t peer) {
        messages.receive(peer, place(peer), size_bytes(peer));
        messages.send(peer, place(rank_), size_bytes(rank_));
      });
      communicator_->exchange(messages.list, native);
    });
  }

  void all_reduce_integers(const AllReduceIntegers& reduce, StreamId stream) override {
    if (reduce.count() == 0) return;
    enqueue("all_reduce_integers", reduce.subject, stream, [&](void* native) {
      communicator_->all_reduce_words(reduce.data, reduce.sum_count, reduce.minimum_count, native);
    });
  }

  void broadcast(const Broadcast& broadcast, StreamId stream) override {
    SLUICE_CHECK(broadcast.root < rank_count_, "the root is one of the ranks");
    if (broadcast.size_bytes == 0) return;
    enqueue("broadcast", broadcast.subject, stream, [&](void* native) {
      communicator_->broadcast(broadcast.data, broadcast.size_bytes, broadcast.root, native);
    });
  }

  void barrier(std::string_view subject, StreamId stream) override {
    enqueue("barrier", subject, stream, [&](void* native) {
      communicator_->all_gather(staging_.data(), staging_.data() + rank_, 1, native);
    });
  }

  std::unique_ptr<Collectives> open(std::span<const std::uint32_t> ranks) override {
    const auto own = std::ranges::find(ranks, rank_);
    SLUICE_CHECK(own != ranks.end(), "a rank opens groups that it is in");
    SLUICE_CHECK(std::ranges::max(ranks) < rank_count_, "a group is made of the object's ranks");
    const auto key = static_cast<std::uint32_t>(own - ranks.begin());
    common_->failure->throw_if_set();
    std::unique_ptr<NcclCollectives> part;
    outside_of_operations("opening a sequence", [&] {
      DeviceBuffer staging = staging_buffer(common_->device);  // first: this communicator can tell
      part = std::make_unique<NcclCollectives>(
          common_, communicator_->split(/*color=*/std::ranges::min(ranks), key), std::move(staging),
          key, static_cast<std::uint32_t>(ranks.size()));
    });
    return part;
  }

  bool may_block() const override { return true; }
  void hand_over(std::function<void()> work) override { common_->caller.post(std::move(work)); }

  void prepare_reductions() override {
    if (common_->reduction == NcclReduction::kPlain || rank_count_ == 1) return;
    const std::uint64_t wanted = staging_bytes(rank_count_);
    if (wanted > staging_.size_bytes()) staging_ = staging_buffer(common_->device, wanted);
    overlap_ = std::make_unique<Overlap>(common_->device);
  }

  void use_memory(std::span<std::byte> memory) override {
    outside_of_operations("registering memory", [&] { communicator_->register_memory(memory); });
  }
  // NCCL unmaps a window at once, also under operations that use it.
  void forget_memory() noexcept override {
    common_->caller.drain();
    common_->watch.await(*communicator_);
    communicator_->deregister_memory();
  }
  std::vector<std::string> notes() const override { return communicator_->notes(); }

  void on_failure(std::function<void(const Error&)> handler) override {
    common_->failure->on_failure(std::move(handler));
  }

  void abort(std::string_view reason) noexcept override {
    common_->watch.fail(
        Error(ErrorCode::kRanks, fmt::format("rank {} has given up: {}", rank_, reason)));
  }

 private:
  using Messages = NcclMessages;

  // The elements of the source that `range` gives a rank are summed there.
  struct Reduction {
    const std::byte* source = nullptr;
    DType source_type = DType::kFp32;
    std::byte* target = nullptr;
    DType target_type = DType::kFp32;
    std::uint64_t share = 0;  // elements of the longest range
    std::uint64_t count = 0;  // elements in all

    ElementRange range(std::uint32_t of_rank) const {
      return {std::min(of_rank * share, count), std::min((of_rank + 1) * share, count)};
    }
  };

  bool is_plain(DType source, DType target) const {
    return common_->reduction == NcclReduction::kPlain && source == target;
  }

  // Enqueues the work of `body` and has it watched. After a failure the device skips later work,
  // and so does this: the other ranks would get data that was never written.
  template <class Body>
  void enqueue(std::string_view kind, std::string_view subject, StreamId stream, const Body& body) {
    if (common_->failure->is_set()) return;
    if (common_->device.has_failed())
      return common_->watch.fail(Error(
          ErrorCode::kRanks,
          fmt::format("rank {} in {} of \"{}\": its device has failed", rank_, kind, subject)));
    try {
      NcclWatch::Operation& operation = common_->watch.begin(*communicator_, kind, subject, stream);
      try {
        body(common_->device.native_stream(stream));
      } catch (...) {
        common_->watch.drop(operation);
        throw;
      }
      common_->watch.end(operation, stream);
    } catch (const std::exception& error) {
      common_->watch.fail(Error(ErrorCode::kRanks, fmt::format("rank {} in {} of \"{}\": {}", rank_,
                                                               kind, subject, error.what())));
    }
  }

  // The other ranks wait for this one there, so a failure ends their work, too.
  template <class Body>
  void outside_of_operations(std::string_view kind, const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      const auto* const known = dynamic_cast<const Error*>(&error);
      common_->watch.fail(Error(known != nullptr ? known->code() : ErrorCode::kInternal,
                                fmt::format("rank {}, {}: {}", rank_, kind, error.what())));
      common_->failure->throw_if_set();  // an earlier one may have ended the communicator
    }
  }

  // Visits every rank but this one. Each begins with its successor, so that not all talk to one.
  template <class Body>
  void for_each_peer(const Body& body) const {
    for (std::uint32_t i = 1; i < rank_count_; ++i) body((rank_ + i) % rank_count_);
  }

  // The first message between two ranks connects them and so waits for the other rank. It happens
  // here, where all ranks are in step, and not in an operation, since a rank may choose the order
  // of operations among sequences.
  void meet() {
    const Stream stream(common_->device, "nccl meets");
    enqueue("connection", "the ranks", stream.id(), [&](void* native) {
      Messages messages;
      for_each_peer([&](std::uint32_t peer) {
        messages.receive(peer, staging_.data() + peer, 1);
        messages.send(peer, staging_.data() + rank_, 1);
      });
      communicator_->exchange(messages.list, native);
    });
    common_->device.synchronize(stream.id());
    common_->failure->throw_if_set();
  }

  // One step after another. A step's messages follow on the stream the sum whose half of the
  // staging memory they overwrite: with two halves, that of the step before the last.
  void reduce_exactly(const Reduction& reduction, StreamId stream) {
    CudaDevice& device = common_->device;
    const ReductionSteps steps =
        reduction_steps(reduction.share, size_of(reduction.source_type), rank_count_,
                        staging_.size_bytes(), /*overlaps=*/overlap_ != nullptr);
    if (steps.halves == 1) {
      for (std::uint64_t step = 0; step < steps.count; ++step) {
        exchange_step(reduction, steps, step, staging_.data(), stream);
        add_step(reduction, steps, step, staging_.data(), stream);
      }
      return;
    }
    for (std::uint64_t step = 0; step < steps.count; ++step) {
      const std::size_t half = step % 2;
      std::byte* const received = staging_.data() + half * (staging_.size_bytes() / 2);
      if (step >= 2) device.wait(stream, overlap_->added[half].id());
      exchange_step(reduction, steps, step, received, stream);
      device.record(overlap_->received[half].id(), stream);
      device.wait(overlap_->sums.id(), overlap_->received[half].id());
      add_step(reduction, steps, step, received, overlap_->sums.id());
      device.record(overlap_->added[half].id(), overlap_->sums.id());
    }
    for (const Event& added : overlap_->added) device.wait(stream, added.id());
  }

  void exchange_step(const Reduction& reduction, const ReductionSteps& steps, std::uint64_t step,
                     std::byte* received, StreamId stream) {
    const std::uint64_t source_bytes = size_of(reduction.source_type);
    const std::uint64_t own_bytes =
        steps.piece(reduction.range(rank_), step).count() * source_bytes;
    Messages messages;
    for_each_peer([&](std::uint32_t peer) {
      const std::uint32_t place = peer < rank_ ? peer : peer - 1;
      messages.receive(peer, received + place * steps.elements * source_bytes, own_bytes);
      const ElementRange theirs = steps.piece(reduction.range(peer), step);
      messages.send(peer, reduction.source + theirs.begin * source_bytes,
                    theirs.count() * source_bytes);
    });
    communicator_->exchange(messages.list, common_->device.native_stream(stream));
  }

  void add_step(const Reduction& reduction, const ReductionSteps& steps, std::uint64_t step,
                const std::byte* received, StreamId stream) {
    const ElementRange own = steps.piece(reduction.range(rank_), step);
    if (own.count() == 0) return;
    common_->sum(
        {.target = reduction.target + step * steps.elements * size_of(reduction.target_type),
         .target_type = reduction.target_type,
         .own = reduction.source + own.begin * size_of(reduction.source_type),
         .received = received,
         .received_stride = steps.elements,
         .source_type = reduction.source_type,
         .rank = rank_,
         .rank_count = rank_count_,
         .element_count = own.count()},
        stream);
  }

  // Constant after construction.
  const std::shared_ptr<Common> common_;
  const std::unique_ptr<NcclCommunicator> communicator_;
  const std::uint32_t rank_;
  const std::uint32_t rank_count_;

  DeviceBuffer staging_;              // for the operation that is under way
  std::unique_ptr<Overlap> overlap_;  // from prepare_reductions() on
};

}  // namespace

std::string why_no_nccl(const std::string& library) {
  try {
    (void)NcclLibrary::open(library);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string describe_nccl(const std::string& library) {
  const NcclLibrary& opened = NcclLibrary::open(library);
  return opened.version_text() + (opened.limit().empty() ? "" : "; " + opened.limit());
}

NcclId make_nccl_id(const std::string& library) {
  return NcclLibrary::open(library).make_id();
}

CudaMemorySource nccl_memory_source(const std::string& library) {
  const NcclLibrary& opened = NcclLibrary::open(library);
  return opened.has_windows() ? opened.memory_source() : CudaMemorySource{};
}

std::unique_ptr<Collectives> make_nccl_collectives(CudaDevice& device, const NcclOptions& options,
                                                   const NcclId& id, std::uint32_t rank,
                                                   std::uint32_t rank_count) {
  SLUICE_CHECK(rank < rank_count && options.timeout_s >= 0.1, "a rank has a number and a timeout");
  const NcclLibrary& library = NcclLibrary::open(options.library);
  load_kernels(device);  // so that none is loaded behind an operation that waits for another rank
  auto communicator = std::make_unique<NcclCommunicator>(
      library, NcclCommunicator::Options{.timeout_s = options.timeout_s}, device, id, rank,
      rank_count);
  auto common = std::make_shared<Common>(device, options);
  return std::make_unique<NcclCollectives>(std::move(common), std::move(communicator),
                                           staging_buffer(device), rank, rank_count);
}

}  // namespace sluice
