// The names of the values of a config, as in its file and in messages.
#include <sluice/config.h>

namespace sluice {

std::string_view name_of(TierChoice tier) {
  switch (tier) {
    case TierChoice::kAuto: return "auto";
    case TierChoice::kDevice: return "device";
    case TierChoice::kHost: return "host";
    case TierChoice::kNvme: return "nvme";
  }
  return "unknown";
}

std::string_view name_of(IoBackend backend) {
  switch (backend) {
    case IoBackend::kAuto: return "auto";
    case IoBackend::kUring: return "uring";
    case IoBackend::kThreads: return "threads";
    case IoBackend::kSync: return "sync";
  }
  return "unknown";
}

std::string_view name_of(Verify verify) {
  switch (verify) {
    case Verify::kFull: return "full";
    case Verify::kSample: return "sample";
    case Verify::kOff: return "off";
  }
  return "unknown";
}

std::string_view name_of(UnifiedMemory unified) {
  switch (unified) {
    case UnifiedMemory::kAuto: return "auto";
    case UnifiedMemory::kOff: return "off";
    case UnifiedMemory::kOn: return "on";
  }
  return "unknown";
}

std::string_view name_of(GuardMode mode) {
  switch (mode) {
    case GuardMode::kAuto: return "auto";
    case GuardMode::kOff: return "off";
    case GuardMode::kOn: return "on";
  }
  return "unknown";
}

std::string_view name_of(RoomCheck check) {
  switch (check) {
    case RoomCheck::kError: return "error";
    case RoomCheck::kWarn: return "warn";
    case RoomCheck::kOff: return "off";
  }
  return "unknown";
}

std::string_view name_of(NonFinitePolicy policy) {
  switch (policy) {
    case NonFinitePolicy::kStop: return "stop";
    case NonFinitePolicy::kSkip: return "skip";
  }
  return "unknown";
}

std::string_view name_of(UntouchedPolicy policy) {
  switch (policy) {
    case UntouchedPolicy::kUpdate: return "update";
    case UntouchedPolicy::kSkip: return "skip";
    case UntouchedPolicy::kLazy: return "lazy";
  }
  return "unknown";
}

std::string_view name_of(RankReduction reduction) {
  switch (reduction) {
    case RankReduction::kExact: return "exact";
    case RankReduction::kNccl: return "nccl";
    case RankReduction::kNodes: return "nodes";
  }
  return "unknown";
}

std::string_view name_of(OverlapPolicy policy) {
  switch (policy) {
    case OverlapPolicy::kAuto: return "auto";
    case OverlapPolicy::kEager: return "eager";
    case OverlapPolicy::kDeferred: return "deferred";
    case OverlapPolicy::kSpeculative: return "speculative";
    case OverlapPolicy::kSerial: return "serial";
  }
  return "unknown";
}

std::string_view name_of(UpdateProcessor processor) {
  switch (processor) {
    case UpdateProcessor::kCpu: return "cpu";
    case UpdateProcessor::kDevice: return "device";
  }
  return "unknown";
}

std::string_view name_of(MicroBatchOrder order) {
  return order == MicroBatchOrder::kVertical ? "vertical" : "horizontal";
}

std::string_view name_of(ActivationHome home) {
  switch (home) {
    case ActivationHome::kKeep: return "keep";
    case ActivationHome::kRecompute: return "recompute";
    case ActivationHome::kHost: return "host";
    case ActivationHome::kNvme: return "nvme";
  }
  return "unknown";
}

}  // namespace sluice
