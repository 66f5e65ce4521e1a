#include "gpu/ranks/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <type_traits>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include "gpu/cuda/cuda_environment.h"
#include "gpu/ranks/nccl_functions.inc"

namespace sluice {
namespace {

// ncclCommSplit and the configurable communicator.
constexpr int kVersionMin = NCCL_VERSION(2, 18, 1);
constexpr int kVersionOfCopyEngines = NCCL_VERSION(2, 28, 3);

[[noreturn]] void fail(ErrorCode code, const std::string& message) {
  throw Error(code, message);
}

std::string text_of_version(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

void prepare_nccl_environment() {
  // Connections are made together with the communicator.
  (void)::setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
  // With registered buffers, every multicast operation meets the other ranks of the machine on the
  // host when it is enqueued. Ranks that enqueue on two communicators in different orders would
  // wait for each other. Windows do not need it.
  (void)::setenv("NCCL_LOCAL_REGISTER", "0", /*overwrite=*/0);
  prepare_cuda_environment();
}

NcclLibrary::NcclLibrary(const std::string& path) : functions_(std::make_unique<Functions>()) {
  const std::string name = path.empty() ? "libnccl.so.2" : path;
  void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    fail(
        ErrorCode::kUnsupported,
        fmt::format("NCCL cannot be opened: {}; put its folder into LD_LIBRARY_PATH", ::dlerror()));
  std::vector<std::string> missing;
  const auto find = [&](auto& function, const char* symbol, bool is_needed) {
    void* const address = ::dlsym(handle, symbol);
    if (address == nullptr && is_needed) missing.emplace_back(symbol);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  const auto need = [&](auto& function, const char* symbol) { find(function, symbol, true); };
  const auto want = [&](auto& function, const char* symbol) { find(function, symbol, false); };
  Functions& f = *functions_;
  need(f.get_version, "ncclGetVersion");
  need(f.get_unique_id, "ncclGetUniqueId");
  need(f.get_error_string, "ncclGetErrorString");
  need(f.get_last_error, "ncclGetLastError");
  need(f.init, "ncclCommInitRankConfig");
  need(f.split, "ncclCommSplit");
  need(f.finalize, "ncclCommFinalize");
  need(f.destroy, "ncclCommDestroy");
  need(f.abort, "ncclCommAbort");
  need(f.get_async_error, "ncclCommGetAsyncError");
  need(f.count, "ncclCommCount");
  need(f.group_start, "ncclGroupStart");
  need(f.group_end, "ncclGroupEnd");
  need(f.send, "ncclSend");
  need(f.receive, "ncclRecv");
  need(f.all_gather, "ncclAllGather");
  need(f.reduce_scatter, "ncclReduceScatter");
  need(f.all_reduce, "ncclAllReduce");
  need(f.broadcast, "ncclBroadcast");
  want(f.allocate, "ncclMemAlloc");
  want(f.free, "ncclMemFree");
  want(f.register_window, "ncclCommWindowRegister");
  want(f.deregister_window, "ncclCommWindowDeregister");
  if (f.get_version != nullptr) (void)f.get_version(&version_);
  if (version_ < kVersionMin || !missing.empty())
    fail(ErrorCode::kUnsupported,
         fmt::format("{} is NCCL {}{}{}; install release {} or later", name,
                     text_of_version(version_), missing.empty() ? "" : " without ",
                     fmt::join(missing, ", "), text_of_version(kVersionMin)));
}
NcclLibrary::~NcclLibrary() = default;

const NcclLibrary& NcclLibrary::open(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<NcclLibrary>> libraries;
  const std::scoped_lock lock(mutex);
  std::unique_ptr<NcclLibrary>& library = libraries[path];
  if (library == nullptr) library.reset(new NcclLibrary(path));
  return *library;
}

std::string NcclLibrary::version_text() const {
  return text_of_version(version_);
}

bool NcclLibrary::has_windows() const {
  return version_ >= kVersionOfCopyEngines && functions_->register_window != nullptr &&
         functions_->deregister_window != nullptr && functions_->allocate != nullptr &&
         functions_->free != nullptr;
}

std::string NcclLibrary::limit() const {
  if (has_windows()) return "";
  return fmt::format(
      "NCCL {} has no windows for copy engines, as {} has: multiprocessors do the gathers",
      version_text(), text_of_version(kVersionOfCopyEngines));
}

NcclId NcclLibrary::make_id() const {
  ncclUniqueId id;
  static_assert(sizeof id == sizeof(NcclId));
  if (const ncclResult_t result = functions_->get_unique_id(&id); result != ncclSuccess)
    fail(ErrorCode::kRanks, fmt::format("ncclGetUniqueId: {}; NCCL_DEBUG=INFO says more",
                                        functions_->get_error_string(result)));
  NcclId bytes;
  std::memcpy(bytes.data(), &id, sizeof id);
  return bytes;
}

CudaMemorySource NcclLibrary::memory_source() const {
  SLUICE_CHECK(has_windows(), "there is memory for windows");
  return {.allocate =
              [f = functions_.get()](void** memory, std::size_t size_bytes) {
                return f->allocate(memory, size_bytes) == ncclSuccess;
              },
          .free = [f = functions_.get()](void* memory) { return f->free(memory) == ncclSuccess; }};
}

}  // namespace sluice
