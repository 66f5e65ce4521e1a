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
      up_(device, "optimizer up", StreamPriority::kHigh),
      digests_(plan, device) {
  for (Place place = plan.staging_slots; place-- > 0;) {
    free_.push_back(place);
    copied_.emplace_back(device);
    has_parameter_.push_back(0);
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
  const bool may_be_known = digests_.suits(block, values.parameter) && digests_.has_written(block);
  has_parameter_[place] = may_be_known ? 0 : 1;
  std::byte* const target = parameter(place);
  const std::array pieces{CopyPiece{target + staged_gradient_offset(plan_.blocks[block]),
                                    values.gradient, values.gradient_bytes},
                          CopyPiece{target, values.parameter, values.parameter_bytes}};
  const std::uint64_t parameter_bytes = may_be_known ? 0 : values.parameter_bytes;
  const TraceRecord record =
      begun(block, values, TraceKind::kCopyToHost, parameter_bytes + values.gradient_bytes);
  if (may_be_known)
    digests_.take_present(block, {values.parameter, values.parameter_bytes}, digests(place, block),
                          down_.id());
  device_.copy_all(std::span(pieces).first(may_be_known ? 1 : 2), down_.id());
  follow(down_, copied_[place], record,
         [this, place, block, values, may_be_known, done = std::move(done)]() mutable {
           if (!may_be_known || digests_.is_unchanged(block, digests(place, block))) return done();
           bring_parameter(place, block, values, std::move(done));
         });
}

// The application has changed it.
void DetachedStaging::bring_parameter(Place place, std::uint32_t block, const DeviceValues& values,
                                      std::function<void()> done) {
  has_parameter_[place] = 1;
  const TraceRecord record = begun(block, values, TraceKind::kCopyToHost, values.parameter_bytes);
  device_.copy(parameter(place), values.parameter, values.parameter_bytes, down_.id());
  follow(down_, copied_[place], record, std::move(done));
}

void DetachedStaging::send(Place place, std::uint32_t block, const DeviceValues& values,
                           std::function<void()> done) {
  const TraceRecord record = begun(block, values, TraceKind::kCopyToDevice, values.parameter_bytes);
  device_.copy(values.parameter, parameter(place), values.parameter_bytes, up_.id());
  if (digests_.suits(block, values.parameter)) {
    digests_.take_written(block, {values.parameter, values.parameter_bytes}, up_.id());
  } else {
    digests_.forget(block);
  }
  follow(up_, copied_[place], record, [this, place, done = std::move(done)] {
    free_.push_back(place);
    done();
  });
}

// The record of a copy that begins now.
TraceRecord DetachedStaging::begun(std::uint32_t block, const DeviceValues& values, TraceKind kind,
                                   std::uint64_t size_bytes) const {
  return {.begin_ns = trace_now_ns(),
          .size_bytes = size_bytes,
          .step = values.update,
          .unit = plan_.blocks[block].tensor,
          .block = block,
          .kind = kind};
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
      // The time in which the stream still did other work is in it, too.
      ended.started_ns = ended.begin_ns;
      ended.end_ns = ended.moved_ns = trace_now_ns();
      trace_span(ended);
      done();
    });
  });
}

}  // namespace sluice
