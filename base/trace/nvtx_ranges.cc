// base/trace/trace_ranges.h over NVTX, which consists of headers alone. At the first call they open
// the listening tool that the environment names.
#include <nvtx3/nvToolsExt.h>

#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include <fmt/format.h>

#include "base/trace/trace_ranges.h"

namespace sluice {
namespace {

// A range's name depends on these, except that of a step.
using Name = std::tuple<TraceKind, std::uint32_t, std::uint8_t>;  // kind, unit, detail

struct Ranges {
  nvtxDomainHandle_t domain = ::nvtxDomainCreateA("sluice");
  std::mutex mutex;
  // Guarded by mutex. Strings that the tool knows already.
  std::map<Name, nvtxStringHandle_t> names;
  std::vector<std::string> units;
};

// Never destroyed, because ranges may end as late as the process does.
Ranges& ranges() {
  static Ranges* const instance = new Ranges;
  return *instance;
}

nvtxStringHandle_t name_for(const TraceRecord& record) {
  Ranges& all = ranges();
  const std::scoped_lock lock(all.mutex);
  const auto [found, is_new] =
      all.names.try_emplace({record.kind, record.unit, record.detail}, nullptr);
  if (is_new) {
    const std::string unit = record.unit < all.units.size() ? all.units[record.unit]
                             : record.unit == kTraceNone    ? std::string()
                                                            : fmt::format("unit {}", record.unit);
    found->second = ::nvtxDomainRegisterStringA(all.domain, span_name(record, unit).c_str());
  }
  return found->second;
}

}  // namespace

void enable_trace_ranges() {
  (void)ranges();
  trace_ranges_are_on.store(true);
}

void name_trace_units(const std::vector<std::string>& names) {
  if (!trace_ranges_are_on.load()) return;
  const std::scoped_lock lock(ranges().mutex);
  ranges().units = names;
  ranges().names.clear();
}

TraceRangeId start_nvtx_range(const TraceRecord& record) {
  nvtxEventAttributes_t attributes = {};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  std::string text;
  if (record.kind == TraceKind::kStep) {  // each has another name
    text = span_name(record, {});
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = text.c_str();
  } else {
    attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    attributes.message.registered = name_for(record);
  }
  return TraceRangeId{::nvtxDomainRangeStartEx(ranges().domain, &attributes)};
}

void end_nvtx_range(TraceRangeId range) {
  ::nvtxDomainRangeEnd(ranges().domain, static_cast<nvtxRangeId_t>(range));
}

}  // namespace sluice
