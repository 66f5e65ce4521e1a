#include "engine/detached/detached_staging.h"

#include <array>
#include <exception>
#include <utility>

#include <sluice/error.h>

namespace sluice {

DetachedStaging::DetachedStaging(const DetachedPlan& plan, Device& device, Scheduler& scheduler)
    : plan_(plan),
      device_(device),
      scheduler_(scheduler),
      memory_(plan.staging_slots * plan.staging_bytes, "parameters and gradients from the device"),
      given_(device),
      down_(device, "optimizer down", StreamPriority::kHigh),
      up_(device, "optimizer up", StreamPriority::kHigh) {
  for (Place place = plan.staging_slots; place-- > 0;) {
    free_.push_back(place);
    copied_.emplace_back(device);
  }
  device_.register_host_memory(memory_.span());
}

DetachedStaging::~DetachedStaging() {
  SLUICE_CHECK(is_idle(), "the flow waits for copies before it goes");
  device_.unregister_host_memory(memory_.span());
}

void DetachedStaging::wait_for(StreamId stream) {
  device_.record(given_.id(), stream);
  device_.wait(down_.id(), given_.id());
}

DetachedStaging::Place DetachedStaging::take() {
  SLUICE_CHECK(!free_.empty(), "has_place() is asked first");
  const Place place = free_.back();
  free_.pop_back();
  return place;
}

void DetachedStaging::bring(Place place, std::uint32_t block, const DeviceValues& values,
                            std::function<void()> done) {
  std::byte* const target = parameter(place);
  const std::array pieces{CopyPiece{target, values.parameter, values.parameter_bytes},
                          CopyPiece{target + staged_gradient_offset(plan_.blocks[block]),
                                    values.gradient, values.gradient_bytes}};
  const TraceRecord record{.begin_ns = trace_now_ns(),
                           .size_bytes = values.parameter_bytes + values.gradient_bytes,
                           .unit = plan_.blocks[block].tensor,
                           .block = block,
                           .kind = TraceKind::kCopyToHost};
  device_.copy_all(pieces, down_.id());
  follow(down_, copied_[place], record, std::move(done));
}

void DetachedStaging::send(Place place, std::uint32_t block, const DeviceValues& values,
                           std::function<void()> done) {
  const TraceRecord record{.begin_ns = trace_now_ns(),
                           .size_bytes = values.parameter_bytes,
                           .unit = plan_.blocks[block].tensor,
                           .block = block,
                           .kind = TraceKind::kCopyToDevice};
  device_.copy(values.parameter, parameter(place), values.parameter_bytes, up_.id());
  follow(up_, copied_[place], record, [this, place, done = std::move(done)] {
    free_.push_back(place);
    done();
  });
}

void DetachedStaging::follow(const Stream& stream, const Event& copied, TraceRecord record,
                             std::function<void()> done) {
  device_.record(copied.id(), stream.id());
  ++copies_;
  device_.notify(stream.id(), [this, event = copied.id(), record, done = std::move(done)] {
    scheduler_.post([this, event, record, done] {
      --copies_;
      try {
        device_.synchronize(event);  // has been reached: rethrows a failure of the device
      } catch (...) {
        return scheduler_.fail(std::current_exception());
      }
      TraceRecord ended = record;
      ended.end_ns = trace_now_ns();
      trace_span(ended);
      done();
    });
  });
}

}  // namespace sluice
