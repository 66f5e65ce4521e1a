// The reference queue: pread and pwrite, one request after another, on the thread that submits; the
// requests of one submit() go by their priorities.
#include <cstdint>
#include <memory>

#include "io/blocking_transfer.h"
#include "io/io_queue.h"
#include "io/pending_list.h"
#include "io/request_ledger.h"
#include "io/transfer_progress.h"

namespace sluice {
namespace {

class SyncQueue final : public IoQueue {
 public:
  // Another thread may still be inside submit() after this one has seen its request complete.
  ~SyncQueue() override { ledger_.wait_idle(); }

  void submit(std::span<IoRequest* const> requests) override {
    for (IoRequest* request : requests) begin_transfer(*request);
    std::uint64_t ticket = ledger_.open(requests.size());
    PendingList waiting;
    for (IoRequest* request : requests) waiting.push({request, ticket++});
    while (waiting.count() != 0) {
      const Submission next = waiting.pop();
      transfer_blocking(*next.request, ledger_);
      next.request->on_complete(*next.request);  // from here on the request may be gone
      ledger_.close(next.ticket);
    }
  }

  void wait_idle() override { ledger_.wait_idle(); }
  IoCounters counters() const override { return ledger_.counters(); }
  std::string_view name() const override { return "sync"; }

 private:
  RequestLedger ledger_;
};

}  // namespace

std::unique_ptr<IoQueue> make_sync_queue(const IoQueueOptions& options) {
  check_options(options);
  return std::make_unique<SyncQueue>();
}

}  // namespace sluice
