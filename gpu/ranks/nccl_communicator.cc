#include "gpu/ranks/nccl_communicator.h"

#include <dlfcn.h>
#include <nccl.h>

#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "gpu/cuda/cuda_current_device.h"

namespace sluice {

// The functions under their own types. The second half is null in versions that lack them.
struct NcclLibrary::Functions {
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclGetErrorString) get_error_string;
  decltype(&ncclGetLastError) get_last_error;
  decltype(&ncclCommInitRankConfig) init;
  decltype(&ncclCommSplit) split;
  decltype(&ncclCommFinalize) finalize;
  decltype(&ncclCommDestroy) destroy;
  decltype(&ncclCommAbort) abort;
  decltype(&ncclCommGetAsyncError) get_async_error;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) receive;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclReduceScatter) reduce_scatter;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclBroadcast) broadcast;

  decltype(&ncclCommRegister) register_buffer;
  decltype(&ncclCommDeregister) deregister_buffer;
  decltype(&ncclMemAlloc) allocate;
  decltype(&ncclMemFree) free;
  decltype(&ncclCommWindowRegister) register_window;
  decltype(&ncclCommWindowDeregister) deregister_window;
};

namespace {

// ncclCommSplit and the configurable communicator.
constexpr int kVersionMin = NCCL_VERSION(2, 18, 1);
constexpr int kVersionOfRegistration = NCCL_VERSION(2, 19, 1);
constexpr int kVersionOfCopyEngines = NCCL_VERSION(2, 28, 3);
// Thread blocks of one operation: the sequences of all ranks have to fit a GPU at once, otherwise
// ranks that issue them in different orders would wait for each other.
constexpr int kBlocksMax = 16;
constexpr std::chrono::microseconds kPollInterval{20};

[[noreturn]] void fail(ErrorCode code, const std::string& message) {
  throw Error(code, message);
}

ncclComm_t native(void* communicator) {
  return static_cast<ncclComm_t>(communicator);
}
cudaStream_t native_stream(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

ncclDataType_t data_type(DType type) {
  switch (type) {
    case DType::kFp32: break;
    case DType::kBf16: return ncclBfloat16;
    case DType::kFp16: return ncclFloat16;
  }
  return ncclFloat32;
}

std::string text_of_version(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

ncclConfig_t config_of(const NcclLibrary& library, const NcclCommunicator::Options& options) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.maxCTAs = kBlocksMax;
  if (options.prefers_copy_engines && library.has_windows())
    config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
  return config;
}

// Calls `operation` with each of `all` until one fails. NCCL makes one launch of them.
template <class All, class Operation>
ncclResult_t in_group(const NcclLibrary::Functions& f, const All& all, const Operation& operation) {
  const auto is_good = [](ncclResult_t r) { return r == ncclSuccess || r == ncclInProgress; };
  ncclResult_t result = f.group_start();
  for (const auto& one : all)
    if (is_good(result)) result = operation(one);
  const ncclResult_t ended = f.group_end();  // always, because the group belongs to the thread
  return is_good(result) ? ended : result;
}

}  // namespace

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
  need(f.group_start, "ncclGroupStart");
  need(f.group_end, "ncclGroupEnd");
  need(f.send, "ncclSend");
  need(f.receive, "ncclRecv");
  need(f.all_gather, "ncclAllGather");
  need(f.reduce_scatter, "ncclReduceScatter");
  need(f.all_reduce, "ncclAllReduce");
  need(f.broadcast, "ncclBroadcast");
  want(f.register_buffer, "ncclCommRegister");
  want(f.deregister_buffer, "ncclCommDeregister");
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

bool NcclLibrary::has_registration() const {
  return version_ >= kVersionOfRegistration && functions_->register_buffer != nullptr &&
         functions_->deregister_buffer != nullptr;
}

bool NcclLibrary::has_windows() const {
  return version_ >= kVersionOfCopyEngines && functions_->register_window != nullptr &&
         functions_->deregister_window != nullptr && functions_->allocate != nullptr &&
         functions_->free != nullptr;
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

NcclCommunicator::NcclCommunicator(const NcclLibrary& library, const Options& options,
                                   CudaDevice& device)
    : library_(library), nccl_(library.functions()), options_(options), device_(device) {}

NcclCommunicator::NcclCommunicator(const NcclLibrary& library, const Options& options,
                                   CudaDevice& device, const NcclId& id, std::uint32_t rank,
                                   std::uint32_t rank_count)
    : NcclCommunicator(library, options, device) {
  ncclUniqueId common;
  std::memcpy(&common, id.data(), sizeof common);
  ncclConfig_t config = config_of(library, options);
  const CudaCurrentDevice current(device.ordinal());
  ncclComm_t made = nullptr;
  const ncclResult_t result = library.functions().init(&made, static_cast<int>(rank_count), common,
                                                       static_cast<int>(rank), &config);
  communicator_ = made;
  settle(result, "ncclCommInitRankConfig");
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::split(std::uint32_t color, std::uint32_t key) {
  std::unique_ptr<NcclCommunicator> part(new NcclCommunicator(library_, options_, device_));
  ncclConfig_t config = config_of(library_, options_);
  ncclComm_t made = nullptr;
  call("ncclCommSplit", [&](ncclComm_t whole) {
    return nccl_.split(whole, static_cast<int>(color), static_cast<int>(key), &made, &config);
  });
  part->communicator_ = made;
  part->settle(ncclInProgress, "ncclCommSplit");
  return part;
}

NcclCommunicator::~NcclCommunicator() {
  const CudaCurrentDevice current(device_.ordinal(), std::nothrow);
  if (has_failed_) abort();
  deregister_memory();
  if (communicator_ == nullptr) return;
  try {
    call("ncclCommFinalize", [&](ncclComm_t c) { return nccl_.finalize(c); });
    (void)nccl_.destroy(native(communicator_));
  } catch (const Error&) {
    abort();  // the other ranks are gone, or have learned of it
  }
}

// Runs `body` with the communicator, and waits until the work that it has begun is on its stream.
template <class Body>
void NcclCommunicator::call(const char* name, const Body& body) {
  const CudaCurrentDevice current(device_.ordinal());
  ncclResult_t result = ncclSuccess;
  {
    const std::scoped_lock lock(mutex_);
    if (communicator_ == nullptr) fail(ErrorCode::kRanks, fmt::format("{} after abort", name));
    result = body(native(communicator_));
  }
  settle(result, name);
}

void NcclCommunicator::settle(int first_result, const char* name) {
  using std::chrono::steady_clock;
  auto result = static_cast<ncclResult_t>(first_result);
  const auto begin = steady_clock::now();
  while (result == ncclInProgress) {
    {
      const std::scoped_lock lock(mutex_);
      if (communicator_ == nullptr) fail(ErrorCode::kRanks, fmt::format("{} after abort", name));
      const ncclResult_t asked = nccl_.get_async_error(native(communicator_), &result);
      if (asked != ncclSuccess) result = asked;
    }
    if (result != ncclInProgress) break;
    if (steady_clock::now() - begin > std::chrono::duration<double>(options_.timeout_s))
      give_up(
          fmt::format("{} has waited for other ranks for more than {} s; one may be stopped; if "
                      "it is only late, raise sharding.timeout",
                      name, options_.timeout_s));
    std::this_thread::sleep_for(kPollInterval);
  }
  if (result != ncclSuccess) give_up(fmt::format("{}: {}", name, describe(result)));
}

void NcclCommunicator::give_up(const std::string& message) {
  has_failed_ = true;
  fail(ErrorCode::kRanks, message);
}

std::string NcclCommunicator::describe(int result) {
  const std::scoped_lock lock(mutex_);
  const char* const last = nccl_.get_last_error(native(communicator_));
  return fmt::format(
      "NCCL {} reports: {}{}{}; NCCL_DEBUG=INFO in the environment makes it say more",
      library_.version_text(), nccl_.get_error_string(static_cast<ncclResult_t>(result)),
      last == nullptr || *last == '\0' ? "" : ": ", last == nullptr ? "" : last);
}

void NcclCommunicator::all_gather(std::byte* target, const std::byte* source,
                                  std::uint64_t shard_bytes, void* stream) {
  call("ncclAllGather", [&](ncclComm_t c) {
    return nccl_.all_gather(source, target, shard_bytes, ncclInt8, c, native_stream(stream));
  });
}

void NcclCommunicator::broadcast(std::byte* data, std::uint64_t size_bytes, std::uint32_t root,
                                 void* stream) {
  call("ncclBroadcast", [&](ncclComm_t c) {
    return nccl_.broadcast(data, data, size_bytes, ncclInt8, static_cast<int>(root), c,
                           native_stream(stream));
  });
}

void NcclCommunicator::exchange(std::span<const NcclMessage> messages, void* stream) {
  if (messages.empty()) return;
  call("ncclSend and ncclRecv", [&](ncclComm_t c) {
    return in_group(nccl_, messages, [&](const NcclMessage& message) {
      const int peer = static_cast<int>(message.peer);
      const cudaStream_t native = native_stream(stream);
      return message.is_send
                 ? nccl_.send(message.data, message.size_bytes, ncclInt8, peer, c, native)
                 : nccl_.receive(message.data, message.size_bytes, ncclInt8, peer, c, native);
    });
  });
}

void NcclCommunicator::reduce_scatter(std::byte* target, const std::byte* source, DType type,
                                      std::uint64_t shard_elements, void* stream) {
  call("ncclReduceScatter", [&](ncclComm_t c) {
    return nccl_.reduce_scatter(source, target, shard_elements, data_type(type), ncclSum, c,
                                native_stream(stream));
  });
}

void NcclCommunicator::all_reduce(std::byte* data, DType type, std::uint64_t element_count,
                                  void* stream) {
  call("ncclAllReduce", [&](ncclComm_t c) {
    return nccl_.all_reduce(data, data, element_count, data_type(type), ncclSum, c,
                            native_stream(stream));
  });
}

void NcclCommunicator::all_reduce_words(std::byte* data, std::uint64_t sum_count,
                                        std::uint64_t minimum_count, void* stream) {
  call("ncclAllReduce", [&](ncclComm_t c) {
    return in_group(nccl_, std::array{ncclSum, ncclMin}, [&](ncclRedOp_t reduction) {
      std::byte* const words =
          data + (reduction == ncclSum ? 0 : sum_count * sizeof(std::uint64_t));
      const std::uint64_t count = reduction == ncclSum ? sum_count : minimum_count;
      if (count == 0) return ncclSuccess;
      return nccl_.all_reduce(words, words, count, ncclUint64, reduction, c, native_stream(stream));
    });
  });
}

void NcclCommunicator::register_memory(std::span<std::byte> memory) {
  if (memory.empty() || !library_.has_registration()) return;
  void* handle = nullptr;
  if (library_.has_windows()) {
    ncclWindow_t window = nullptr;
    call("ncclCommWindowRegister", [&](ncclComm_t c) {
      return nccl_.register_window(c, memory.data(), memory.size(), &window,
                                   NCCL_WIN_COLL_SYMMETRIC);
    });
    handle = window;
  } else {
    call("ncclCommRegister", [&](ncclComm_t c) {
      return nccl_.register_buffer(c, memory.data(), memory.size(), &handle);
    });
  }
  const std::scoped_lock lock(mutex_);
  if (handle != nullptr) registrations_.push_back(handle);  // null: NCCL has no use for it
}

void NcclCommunicator::deregister_memory() noexcept {
  const CudaCurrentDevice current(device_.ordinal(), std::nothrow);
  const std::scoped_lock lock(mutex_);
  for (void* const handle : std::exchange(registrations_, {})) {
    if (communicator_ == nullptr) continue;  // it went with the communicator
    if (library_.has_windows()) {
      (void)nccl_.deregister_window(native(communicator_), static_cast<ncclWindow_t>(handle));
    } else {
      (void)nccl_.deregister_buffer(native(communicator_), handle);
    }
  }
}

std::string NcclCommunicator::failure() {
  ncclResult_t result = ncclSuccess;
  {
    const std::scoped_lock lock(mutex_);
    if (communicator_ == nullptr) return "";
    const ncclResult_t asked = nccl_.get_async_error(native(communicator_), &result);
    if (asked != ncclSuccess) result = asked;
  }
  return result == ncclSuccess || result == ncclInProgress ? "" : describe(result);
}

void NcclCommunicator::abort() noexcept {
  const CudaCurrentDevice current(device_.ordinal(), std::nothrow);
  const std::scoped_lock lock(mutex_);
  if (communicator_ == nullptr) return;
  (void)nccl_.abort(native(std::exchange(communicator_, nullptr)));
}

}  // namespace sluice
