// The reference queue: pread and pwrite, one request after another, on the thread that submits.
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <memory>

#include "io/io_queue.h"
#include "io/request_ledger.h"
#include "io/transfer_progress.h"

namespace sluice {
namespace {

// Bytes moved, or -errno.
std::int64_t attempt(const IoRequest& request) {
  const TransferAttempt next = next_attempt(request);
  const auto offset = static_cast<off_t>(next.offset_bytes);
  const ssize_t moved = request.kind == IoKind::kRead
                            ? ::pread(request.descriptor, next.data, next.length_bytes, offset)
                            : ::pwrite(request.descriptor, next.data, next.length_bytes, offset);
  return moved >= 0 ? moved : -static_cast<std::int64_t>(errno);
}

class SyncQueue final : public IoQueue {
 public:
  // Another thread may still be inside submit() of a request that this one has seen complete.
  ~SyncQueue() override { ledger_.wait_idle(); }

  void submit(std::span<IoRequest* const> requests) override {
    for (IoRequest* request : requests) begin_transfer(*request);
    std::uint64_t ticket = ledger_.open(requests.size());
    for (IoRequest* request : requests) {
      TransferStep step;
      do {
        step = advance_transfer(*request, attempt(*request));
        ledger_.count(*request, step);
      } while (step != TransferStep::kEnded);
      request->on_complete(*request);
      ledger_.close(ticket++);
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
