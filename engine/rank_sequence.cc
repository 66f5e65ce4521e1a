#include "engine/rank_sequence.h"

namespace sluice {

// Relaxed: what orders the two is the event behind the operation.
void RankSequence::begin(BeginTime* begun_ns) {
  begin_ns_ = trace_now_ns();
  if (begun_ns != nullptr) begun_ns->store(begin_ns_, std::memory_order_relaxed);
}

void RankSequence::end(const CollectiveSpan& span) const {
  trace_span({.begin_ns = begin_ns_,
              .end_ns = trace_now_ns(),
              .size_bytes = span.size_bytes,
              .step = span.step,
              .unit = index_of(span.unit),
              .kind = TraceKind::kCollective,
              .detail = span.detail});
}

}  // namespace sluice
