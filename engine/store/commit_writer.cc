#include "engine/store/commit_writer.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/trace/trace_recorder.h"
#include "engine/store/block_store.h"
#include "engine/store/commit_format.h"
#include "io/errno_action.h"

namespace sluice {

struct CommitWriter::Action {
  CommitWriter* writer = nullptr;
  CommitAction what;
  Transfer transfer;           // the request, as the watch sees it
  std::uint64_t begin_ns = 0;  // for traces
  std::uint64_t submitted_ns = 0;
  std::uint64_t ended_ns = 0;
};

CommitWriter::CommitWriter(IoQueue& queue, const CommitFiles& files,
                           std::function<void(std::function<void()>)> post, TransferWatch* watch)
    : queue_(queue),
      files_(files),
      post_(std::move(post)),
      watch_(watch),
      buffer_(files.slot_bytes, "commit records") {
  SLUICE_CHECK(files.twins.size() == kCommitTwins, "a store has twins of its records");
  SLUICE_CHECK(files.slot_bytes % kCommitAlignBytes == 0, "a slot is whole pages");
  while (actions_.size() < std::max(files.data.size(), files.twins.size()))
    actions_.push_back(std::make_unique<Action>());
}

CommitWriter::~CommitWriter() = default;

void CommitWriter::begin(CommitSequence sequence, std::uint32_t slot, std::uint64_t record_bytes,
                         std::uint64_t step, std::function<void(std::optional<Error>)> ended) {
  SLUICE_CHECK(is_idle() && !sequence.empty(), "one commit at a time");
  SLUICE_CHECK(slot < kCommitSlots && record_bytes <= files_.slot_bytes &&
                   record_bytes % kCommitAlignBytes == 0,
               "a record fits into its slot");
  sequence_ = std::move(sequence);
  stage_ = 0;
  flush_ns_ = 0;
  has_begun_record_ = false;
  slot_ = slot;
  record_bytes_ = record_bytes;
  step_ = step;
  ended_ = std::move(ended);
  begin_stage();
}

const StoreFile& CommitWriter::file_of(const CommitAction& action) const {
  return action.kind == CommitActionKind::kFlushData ? files_.data[action.index]
                                                     : files_.twins[action.index];
}

void CommitWriter::begin_stage() {
  const CommitStage& stage = sequence_[stage_];
  pending_ = stage.size();
  // A submitted request may end, and the next stage begin, before this function continues.
  std::vector<IoRequest*> requests;
  for (std::size_t i = 0; i < stage.size(); ++i) {
    Action& action = *actions_.at(i);
    action.writer = this;
    action.what = stage[i];
    action.begin_ns = trace_now_ns();
    action.submitted_ns = steady_now_ns();
    const StoreFile& file = file_of(stage[i]);
    const bool is_write = stage[i].kind == CommitActionKind::kWriteTwin;
    has_begun_record_ |= is_write;
    IoRequest& request = action.transfer.request;
    request = {.kind = is_write ? IoKind::kWrite : IoKind::kFlush,
               .priority = IoPriority::kNormal,
               .drive = file.drive,
               .descriptor = file.descriptor,
               .offset_bytes = is_write ? slot_ * files_.slot_bytes : 0,
               .data = is_write ? buffer_.data() : nullptr,
               .length_bytes = is_write ? record_bytes_ : 0};
    request.context = &action;
    request.on_complete = [](IoRequest& ended) {
      auto* done = static_cast<Action*>(ended.context);
      done->ended_ns = steady_now_ns();
      if (done->writer->watch_ != nullptr) done->writer->watch_->remove(done->transfer);
      done->writer->post_([done] { done->writer->action_ended(*done); });
    };
    if (watch_ != nullptr) {
      action.transfer.subject = describe(stage[i]);
      watch_->add(action.transfer, request);
    }
    requests.push_back(&request);
  }
  queue_.submit(requests);
}

void CommitWriter::action_ended(Action& action) {
  if (action.transfer.request.error != 0) {
    if (!failure_) failure_ = error_of(action);
  } else {
    const IoRequest& request = action.transfer.request;
    if (action.what.kind == CommitActionKind::kFlushTwin) {
      const std::uint64_t flush_ns = action.ended_ns - action.submitted_ns;
      flush_ns_ = flush_ns_ == 0 ? flush_ns : std::min(flush_ns_, flush_ns);
    }
    trace_span({.begin_ns = action.begin_ns,
                .end_ns = trace_now_ns(),
                .started_ns = std::max(request.started_ns, action.begin_ns),
                .moved_ns = std::max(request.moved_ns, action.begin_ns),
                .size_bytes = request.length_bytes,
                .step = step_,
                .kind = request.kind == IoKind::kFlush ? TraceKind::kFlush : TraceKind::kWrite,
                .lane = static_cast<std::uint8_t>(request.drive),
                .detail = kTraceOptimizerState});
  }
  if (--pending_ != 0) return;
  if (is_stopped_) return sequence_.clear();
  if (!failure_ && ++stage_ < sequence_.size()) return begin_stage();
  sequence_.clear();
  const auto ended = std::exchange(ended_, {});
  ended(std::exchange(failure_, std::nullopt));  // may begin the next commit
}

std::string CommitWriter::describe(const CommitAction& action) const {
  const StoreFile& file = file_of(action);
  if (action.kind != CommitActionKind::kWriteTwin)
    return fmt::format("flush of {} for the commit of step {}", file.name, step_);
  return fmt::format("write of commit record {} to {} [{}, +{}) for the commit of step {}", slot_,
                     file.name, slot_ * files_.slot_bytes, record_bytes_, step_);
}

Error CommitWriter::error_of(const Action& action) const {
  const IoRequest& request = action.transfer.request;
  return Error(ErrorCode::kIo,
               fmt::format("{} failed: {}; {}", describe(action.what), errno_text(request.error),
                           errno_rule(request.kind, request.error).advice));
}

}  // namespace sluice
