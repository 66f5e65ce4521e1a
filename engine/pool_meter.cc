#include "engine/pool_meter.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace sluice {
namespace {

bool is_on_device(BufferPool pool) {
  return pool == BufferPool::kWindow || pool == BufferPool::kGradientSlots;
}

void raise_marks(PoolMarks& marks, const PoolMarks& others) {
  for (std::size_t i = 0; i < kBufferPools; ++i)
    marks.most_bytes[i] = std::max(marks.most_bytes[i], others.most_bytes[i]);
  marks.device_bytes = std::max(marks.device_bytes, others.device_bytes);
  marks.host_bytes = std::max(marks.host_bytes, others.host_bytes);
}

}  // namespace

void raise_marks(PhaseMarks& marks, const PhaseMarks& others) {
  for (std::size_t phase = 0; phase < kStepPhases; ++phase)
    raise_marks(marks[phase], others[phase]);
}

void PoolMeter::set_capacity(BufferPool pool, std::uint64_t size_bytes) {
  capacity_bytes_[static_cast<std::size_t>(pool)] = size_bytes;
}

void PoolMeter::lend(BufferPool pool, std::uint64_t size_bytes) {
  const auto i = static_cast<std::size_t>(pool);
  lent_.most_bytes[i] += size_bytes;
  SLUICE_CHECK(lent_.most_bytes[i] <= capacity_bytes_[i], "a pool lends no more than it has");
  (is_on_device(pool) ? lent_.device_bytes : lent_.host_bytes) += size_bytes;
  note();
}

void PoolMeter::take_back(BufferPool pool, std::uint64_t size_bytes) {
  const auto i = static_cast<std::size_t>(pool);
  SLUICE_CHECK(lent_.most_bytes[i] >= size_bytes, "what comes back has been lent");
  lent_.most_bytes[i] -= size_bytes;
  (is_on_device(pool) ? lent_.device_bytes : lent_.host_bytes) -= size_bytes;
}

void PoolMeter::enter(StepPhase phase) {
  phase_ = phase;
  note();
}

PhaseMarks PoolMeter::take() {
  const PhaseMarks marks = std::exchange(marks_, {});
  note();
  return marks;
}

void PoolMeter::note() {
  raise_marks(marks_[static_cast<std::size_t>(phase_)], lent_);
}

}  // namespace sluice
