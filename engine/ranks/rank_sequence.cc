#include "engine/ranks/rank_sequence.h"

namespace sluice {

// Relaxed: the event after the operation orders the two accesses.
void RankSequence::begin(const CollectiveSpan& span) {
  record_ = {.begin_ns = trace_now_ns(),
             .size_bytes = span.size_bytes,
             .step = span.step,
             .unit = index_of(span.unit),
             .kind = TraceKind::kCollective,
             .detail = span.detail};
  if (span.begun_ns != nullptr) span.begun_ns->store(record_.begin_ns, std::memory_order_relaxed);
  range_ = begin_trace_range(record_);
}

void RankSequence::end() {
  record_.end_ns = trace_now_ns();
  trace_span(record_);
  end_trace_range(range_);
}

}  // namespace sluice
