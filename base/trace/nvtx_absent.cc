// base/trace/trace_ranges.h for builds without NVTX: switching ranges on fails and says so.
#include <sluice/error.h>
#include "base/trace/trace_ranges.h"

namespace sluice {

void enable_trace_ranges() {
  throw Error(ErrorCode::kUnsupported,
              "trace.nvtx: this build has no NVTX; build with the CUDA toolkit's headers "
              "(nvtx3/nvToolsExt.h), or leave it false");
}

void name_trace_units(const std::vector<std::string>& /*names*/) {}
TraceRangeId start_nvtx_range(const TraceRecord& /*record*/) {
  return TraceRangeId::kNone;
}
void end_nvtx_range(TraceRangeId /*range*/) {}

}  // namespace sluice
