// A tool that listens to NVTX, as Nsight does: NVTX loads it where NVTX_INJECTION64_PATH names it,
// and it writes a line for each range that begins or ends into the file SLUICE_NVTX_RECORD.
#include <nvtx3/nvToolsExt.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace {

std::FILE* record() {
  static std::FILE* const file = std::fopen(std::getenv("SLUICE_NVTX_RECORD"), "w");
  return file;
}

nvtxDomainHandle_t create_domain(const char* name) {
  std::fprintf(record(), "domain\t0\t%s\n", name);
  return reinterpret_cast<nvtxDomainHandle_t>(1);
}

// Registered strings are kept forever: the tool's handle is the text.
nvtxStringHandle_t register_string(nvtxDomainHandle_t, const char* text) {
  char* copy = nullptr;
  return ::asprintf(&copy, "%s", text) < 0 ? nullptr : reinterpret_cast<nvtxStringHandle_t>(copy);
}

nvtxRangeId_t start_range(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  static std::atomic<nvtxRangeId_t> ids{0};
  const nvtxRangeId_t id = ++ids;
  const char* const text = event->messageType == NVTX_MESSAGE_TYPE_REGISTERED
                               ? reinterpret_cast<const char*>(event->message.registered)
                               : event->message.ascii;
  std::fprintf(record(), "%s\t%llu\t%s\n", domain == nullptr ? "homeless" : "begin",
               static_cast<unsigned long long>(id), text);
  return id;
}

void end_range(nvtxDomainHandle_t, nvtxRangeId_t id) {
  std::fprintf(record(), "end\t%llu\t\n", static_cast<unsigned long long>(id));
}

template <class Function>
void put(NvtxFunctionTable table, unsigned index, Function* function) {
  *table[index] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table) {
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0 ||
      size <= NVTX_CBID_CORE2_DomainCreateA)
    return 0;
  put(table, NVTX_CBID_CORE2_DomainCreateA, create_domain);
  put(table, NVTX_CBID_CORE2_DomainRegisterStringA, register_string);
  put(table, NVTX_CBID_CORE2_DomainRangeStartEx, start_range);
  put(table, NVTX_CBID_CORE2_DomainRangeEnd, end_range);
  return 1;
}
