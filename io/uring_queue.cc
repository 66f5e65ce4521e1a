// The fast queue: io_uring. One thread owns the ring: it takes requests from the handover, submits
// them in batches, sleeps in the kernel until something completes, and calls back. An eventfd read
// is always in the ring, so that a handover completes too and ends that sleep.
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include <sluice/error.h>
#include "base/named_thread.h"
#include "base/trace/trace_clock.h"
#include "io/handover.h"
#include "io/io_queue.h"
#include "io/request_ledger.h"
#include "io/transfer_progress.h"
#include "io/uring_ring.h"

namespace sluice {
namespace {

class UringQueue final : public IoQueue {
 public:
  explicit UringQueue(const IoQueueOptions& options)
      : ring_(options.depth + 1, options),  // one for the eventfd read
        handover_(options.backlog != 0 ? options.backlog : options.depth),
        slots_(options.depth),
        owner_(start_thread("sluice-uring", [this] { run(); })) {
    const UringRing::Refusal refusal = begun_.get_future().get();
    if (refusal.error == 0) return;
    owner_.join();
    UringRing::throw_refused(refusal);
  }

  ~UringQueue() override {
    handover_.stop();
    owner_.join();
  }

  void submit(std::span<IoRequest* const> requests) override {
    check_caller();
    for (IoRequest* request : requests) begin_transfer(*request);
    handover_.put(requests, ledger_.open(requests.size()));
  }

  void wait_idle() override {
    check_caller();
    ledger_.wait_idle();
  }

  IoCounters counters() const override { return ledger_.counters(); }
  std::string_view name() const override { return "uring"; }
  std::string_view note() const override { return ring_.note(); }

 private:
  // Completions with this tag belong to the eventfd read; the others carry their slot.
  static constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
  // Milliseconds for which a broken ring is asked again for requests that the kernel still has.
  static constexpr std::uint32_t kRefusalsMax = 500;

  void check_caller() const {
    SLUICE_CHECK(std::this_thread::get_id() != owner_.get_id(),
                 "a callback must neither submit to its own queue nor wait for it");
  }

  void run() {
    const UringRing::Refusal refusal = ring_.begin();
    begun_.set_value(refusal);
    if (refusal.error != 0) return;
    free_slots_.reserve(slots_.size());
    taken_.reserve(slots_.size());
    ended_.reserve(slots_.size());
    completions_.reserve(slots_.size() + 1);
    for (std::uint64_t slot = slots_.size(); slot-- > 0;) free_slots_.push_back(slot);
    while (true) {
      const bool stopping = admit();
      // The eventfd read must have left the ring too, because it writes to a member.
      if (stopping && free_slots_.size() == slots_.size() && !wake_armed_) {
        ring_.release_memory();
        break;
      }
      if (!stopping && !wake_armed_) arm_wake();
      if (const int error = ring_.submit_and_wait(); error != 0) {
        run_broken(error);
        break;
      }
      ring_.reap(completions_);
      settle_all();
      call_back();
    }
    ring_.release_files();
  }

  // The kernel has refused to work the ring. Requests that it has not taken, and all later ones,
  // end with `error`; a request that it has taken belongs to it until it says so. If it does not
  // even report completions any more, those requests also end, after a while. Their failure stops
  // the engine, which then looks at no buffer; the kernel keeps the memory until this thread has
  // ended, and the destructor waits for that.
  void run_broken(int error) {
    broken_error_ = error;
    ring_.take_back(completions_, -error);
    std::uint32_t refusals = 0;
    while (true) {
      refusals = ring_.look() ? 0 : refusals + 1;
      ring_.reap(completions_);
      settle_all();
      if (refusals == kRefusalsMax) {
        for (std::uint64_t slot = 0; slot < slots_.size(); ++slot)
          if (slots_[slot].request != nullptr) settle(slot, -broken_error_);
        wake_armed_ = false;
      }
      taken_.clear();
      const bool stopping = handover_.take(slots_.size(), taken_);
      for (const Submission& submission : taken_) end(submission, broken_error_);
      const bool has_news = !ended_.empty();
      call_back();
      if (stopping && !has_news && free_slots_.size() == slots_.size() && !wake_armed_) break;
      if (!has_news) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // Ends a request that cannot continue.
  void end(const Submission& submission, int error) {
    submission.request->error = error;
    ledger_.count(*submission.request, TransferStep::kEnded);
    submission.request->moved_ns = trace_now_ns();
    ended_.push_back(submission);
  }

  // Moves requests from the handover into free slots. Returns true when the queue is shutting down.
  bool admit() {
    taken_.clear();
    const bool stopping = handover_.take(free_slots_.size(), taken_);
    for (const Submission& submission : taken_) {
      const std::uint64_t slot = free_slots_.back();
      free_slots_.pop_back();
      slots_[slot] = submission;
      prepare(slot);
    }
    return stopping;
  }

  void prepare(std::uint64_t slot) {
    IoRequest& request = *slots_[slot].request;
    note_start(request, trace_now_ns());
    ring_.prepare(request.kind, request.descriptor, next_attempt(request), slot);
  }

  void arm_wake() {
    ring_.prepare(
        IoKind::kRead, handover_.wake_descriptor(),
        {.data = reinterpret_cast<std::byte*>(&wake_count_), .length_bytes = sizeof(wake_count_)},
        kWakeTag);
    wake_armed_ = true;
  }

  void settle_all() {
    for (const UringRing::Completion& completion : completions_)
      settle(completion.tag, completion.result);
    completions_.clear();
  }

  // Records one completion: the request continues, or its slot becomes free.
  void settle(std::uint64_t tag, int result) {
    if (tag == kWakeTag) {
      SLUICE_CHECK(result == sizeof(wake_count_) || result == -EINTR || result == -EAGAIN ||
                       broken_error_ != 0,
                   "reading an eventfd cannot fail");
      wake_armed_ = false;
      return;
    }
    if (slots_[tag].request == nullptr) return;  // it was given up, and has been answered after all
    IoRequest& request = *slots_[tag].request;
    const TransferStep step = advance_transfer(request, result);
    if (step != TransferStep::kEnded && broken_error_ == 0) {
      ledger_.count(request, step);
      return prepare(tag);
    }
    end(slots_[tag], step == TransferStep::kEnded ? request.error : broken_error_);
    slots_[tag] = {};
    free_slots_.push_back(tag);
  }

  void call_back() {
    for (const Submission& ended : ended_) {
      ended.request->on_complete(*ended.request);  // from here on the request may be gone
      ledger_.close(ended.ticket);
    }
    ended_.clear();
  }

  // Any thread.
  UringRing ring_;  // owner thread only, once that thread runs
  Handover handover_;
  RequestLedger ledger_;

  // Owner thread only. No more requests than slots are in the ring, so its completion side, twice
  // as large as the submission side, cannot overflow.
  std::vector<Submission> slots_;
  std::vector<std::uint64_t> free_slots_;
  std::vector<Submission> taken_;
  std::vector<Submission> ended_;
  std::vector<UringRing::Completion> completions_;
  std::uint64_t wake_count_ = 0;
  bool wake_armed_ = false;
  int broken_error_ = 0;  // the errno with which the kernel refused to work the ring

  std::promise<UringRing::Refusal> begun_;  // set by the owner, once

  std::thread owner_;  // last: starts when everything else is ready
};

}  // namespace

std::unique_ptr<IoQueue> make_uring_queue(const IoQueueOptions& options) {
  check_options(options);
  return std::make_unique<UringQueue>(options);
}

}  // namespace sluice
