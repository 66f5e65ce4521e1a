// The trace's view of activations in transit.
#include <algorithm>

#include "engine/flow/activation_flow.h"

namespace sluice {

void ActivationFlow::call_back(const Stream& stream, std::uint32_t access, std::uint64_t size_bytes,
                               std::function<void()> finished) {
  ++in_flight_;
  const bool is_down = &stream == &down_stream_;
  const TraceRecord record{.begin_ns = trace_now_ns(),
                           .size_bytes = size_bytes,
                           .step = step_,
                           .unit = unit_of(access),
                           .kind = is_down ? TraceKind::kCopyToHost : TraceKind::kCopyToDevice,
                           .detail = kTraceActivations};
  device_.notify(stream.id(), [this, record, finished = std::move(finished)] {
    scheduler_.post([this, record, finished] {
      --in_flight_;
      trace_copy(record);
      finished();
      pump();
    });
  });
}

void ActivationFlow::trace_copy(TraceRecord record) {
  std::uint64_t& copied_ns = copied_ns_[record.kind == TraceKind::kCopyToHost ? 1 : 0];
  record.started_ns = std::max(record.begin_ns, copied_ns);
  record.end_ns = record.moved_ns = copied_ns = std::max(trace_now_ns(), record.started_ns);
  trace_span(record);
}

// The unit that computes the value: it crosses from that unit to the next.
std::uint32_t ActivationFlow::unit_of(std::uint32_t access) const {
  return index_of(model_.forward_order[access_at(access).ref.boundary]);
}

}  // namespace sluice
