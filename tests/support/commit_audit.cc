#include "tests/support/commit_audit.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "base/aligned_buffer.h"
#include "engine/store/commit_record.h"
#include "io/checksum.h"

namespace sluice::test {
namespace {

using Inode = std::uint64_t;

Inode inode_of(int descriptor) {
  struct stat status {};
  return ::fstat(descriptor, &status) == 0 ? status.st_ino : 0;
}

bool is_record(const IoRequest& request) {
  std::uint64_t magic = 0;
  if (request.kind != IoKind::kWrite || request.length_bytes < sizeof(CommitHeader)) return false;
  std::memcpy(&magic, request.data, sizeof magic);
  return magic == kCommitMagic;
}

class AuditQueue final : public IoQueue {
 public:
  AuditQueue(std::unique_ptr<IoQueue> inner, CommitAudit& audit)
      : inner_(std::move(inner)), audit_(audit) {}

  void submit(std::span<IoRequest* const> requests) override {
    for (IoRequest* request : requests) {
      auto* const call =
          new Call{.queue = this, .on_complete = request->on_complete, .context = request->context};
      {
        const std::scoped_lock lock(mutex_);
        begin(*request, *call);
      }
      request->context = call;
      request->on_complete = [](IoRequest& ended) {
        const std::unique_ptr<Call> own(static_cast<Call*>(ended.context));
        ended.context = own->context;
        ended.on_complete = own->on_complete;
        own->queue->end(ended, *own);
        ended.on_complete(ended);
      };
      inner_->submit({&request, 1});
    }
  }
  void wait_idle() override { inner_->wait_idle(); }
  IoCounters counters() const override { return inner_->counters(); }
  std::string_view name() const override { return inner_->name(); }
  std::string_view note() const override { return inner_->note(); }

 private:
  struct Place {
    Inode file = 0;
    std::uint64_t offset_bytes = 0;
    auto operator<=>(const Place&) const = default;
  };
  struct Call {
    AuditQueue* queue;
    void (*on_complete)(IoRequest&);
    void* context;
    Place place = {};
    std::uint64_t begun = 0;
    bool is_record = false;
  };

  void fail(const std::string& what) { audit_.violations.push_back(what); }

  void begin(const IoRequest& request, Call& call) {
    call.place = {inode_of(request.descriptor), request.offset_bytes};
    call.begun = ++clock_;
    if (request.kind != IoKind::kWrite) return;
    call.is_record = is_record(request);
    if (call.is_record) return begin_record(request, call.place.file);
    ++audit_.stores;
    descriptors_[call.place.file] = request.descriptor;
    for (const std::set<Place>* named : {&durable_, &pending_})
      if (named->contains(call.place))
        fail(fmt::format("offset {} is named by a commit, and is written again",
                         request.offset_bytes));
    in_flight_.insert(call.place);
  }

  void begin_record(const IoRequest& request, Inode file) {
    const CommitReading reading = decode_commit({request.data, request.length_bytes});
    if (reading.state != CommitState::kWhole) return fail("a record is not whole");
    if (first_twin_ && first_twin_ != file && !first_twin_is_flushed_)
      fail("a twin is written before the other is flushed");
    if (first_twin_) return;  // the second one
    first_twin_ = file;
    first_twin_is_flushed_ = false;
    pending_.clear();
    for (const CommitPlane& plane : reading.record.planes) check_plane(plane);
  }

  // Data files are told apart by what lies at the place.
  void check_plane(const CommitPlane& plane) {
    const CommitExtent& extent = plane.copies[plane.named_copy];
    bool is_found = false;
    for (const auto& [file, descriptor] : descriptors_) {
      const Place place{file, extent.offset_bytes};
      if (!written_.contains(place) || checksum_at(descriptor, plane, extent) != plane.checksum)
        continue;
      is_found = true;
      pending_.insert(place);
      if (in_flight_.contains(place)) fail("a record names what is being written");
      if (flushed_[file] < written_[place])
        fail(fmt::format("a record names offset {}, which is not flushed", place.offset_bytes));
    }
    if (!is_found)
      fail(fmt::format("what a record names at offset {} is not there", extent.offset_bytes));
  }

  static std::uint64_t checksum_at(int descriptor, const CommitPlane& plane,
                                   const CommitExtent& extent) {
    const AlignedBuffer buffer(plane.length_bytes, "a plane");
    const ssize_t count = ::pread(descriptor, buffer.data(), plane.length_bytes,
                                  static_cast<off_t>(extent.offset_bytes));
    if (count != static_cast<ssize_t>(plane.length_bytes)) return ~plane.checksum;
    return checksum({buffer.data(), plane.length_bytes});
  }

  void end(const IoRequest& request, const Call& call) {
    const std::scoped_lock lock(mutex_);
    if (request.kind == IoKind::kRead || request.error != 0) return;
    if (request.kind == IoKind::kWrite) {
      if (call.is_record) return;
      in_flight_.erase(call.place);
      written_[call.place] = ++clock_;
      return;
    }
    if (first_twin_ && call.place.file == *first_twin_) {
      first_twin_is_flushed_ = true;
    } else if (first_twin_ && !descriptors_.contains(call.place.file)) {
      durable_ = std::exchange(pending_, {});
      first_twin_.reset();
      ++audit_.records;
    } else {
      flushed_[call.place.file] = call.begun;
    }
  }

  std::unique_ptr<IoQueue> inner_;
  CommitAudit& audit_;

  std::mutex mutex_;
  std::uint64_t clock_ = 0;
  std::map<Inode, int> descriptors_;        // of data files
  std::map<Place, std::uint64_t> written_;  // when its last write had ended
  std::map<Inode, std::uint64_t> flushed_;  // when its last flush that ended had begun
  std::set<Place> in_flight_;
  std::set<Place> durable_;          // what the last durable record names
  std::set<Place> pending_;          // and the one under way
  std::optional<Inode> first_twin_;  // of the one under way
  bool first_twin_is_flushed_ = false;
};

}  // namespace

std::unique_ptr<IoQueue> make_audit_queue(std::unique_ptr<IoQueue> inner, CommitAudit& audit) {
  return std::make_unique<AuditQueue>(std::move(inner), audit);
}

}  // namespace sluice::test
