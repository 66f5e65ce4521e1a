#include "gpu/ranks/nccl_communicator.h"

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "gpu/cuda/cuda_current_device.h"
#include "gpu/ranks/nccl_functions.inc"

namespace sluice {

namespace {

// Thread blocks of one operation: the sequences of all ranks have to fit a GPU at once, otherwise
// ranks that issue them in different orders would wait for each other.
constexpr int kBlocksMax = 16;
constexpr std::chrono::microseconds kPollInterval{20};
constexpr std::chrono::seconds kCallTime{1};  // for a call that does not block

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
  const ncclResult_t result =
      library.functions().init(given_as<ncclComm_t>(), static_cast<int>(rank_count), common,
                               static_cast<int>(rank), &config);
  communicator_ = given_;
  settle(result, "ncclCommInitRankConfig");
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::split(std::uint32_t color, std::uint32_t key) {
  std::unique_ptr<NcclCommunicator> part(new NcclCommunicator(library_, options_, device_));
  ncclConfig_t config = config_of(library_, options_);
  call("ncclCommSplit", [&](ncclComm_t whole) {
    return nccl_.split(whole, static_cast<int>(color), static_cast<int>(key),
                       given_as<ncclComm_t>(), &config);
  });
  part->communicator_ = given_;
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

template <class Pointer>
Pointer* NcclCommunicator::given_as() {
  given_ = nullptr;
  return reinterpret_cast<Pointer*>(&given_);
}

// Runs `body` with the communicator, and waits until the work that it has begun is on its stream.
template <class Body>
void NcclCommunicator::call(const char* name, const Body& body) {
  const CudaCurrentDevice current(device_.ordinal());
  ncclResult_t result = ncclSuccess;
  {
    const std::scoped_lock calling(calling_mutex_);
    result = body(native(open_communicator(name)));
  }
  // ncclCommSplit and ncclCommWindowRegister answer ncclSuccess although a thread of NCCL still
  // works on them; the communicator knows.
  settle(result == ncclSuccess ? ncclInProgress : result, name);
}

void* NcclCommunicator::open_communicator(const char* name) {
  const std::scoped_lock lock(mutex_);
  if (communicator_ == nullptr) fail(ErrorCode::kRanks, fmt::format("{} after abort", name));
  return communicator_;
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
  if (result == ncclSuccess) result = static_cast<ncclResult_t>(finish_call());
  if (result != ncclSuccess) give_up(fmt::format("{}: {}", name, describe(result)));
}

// Up to 2.25, NCCL keeps what a thread has begun on a communicator until the next question about
// this communicator but the one for errors. The thread's next call on another one would read it.
int NcclCommunicator::finish_call() {
  const std::scoped_lock lock(mutex_);
  int ranks = 0;
  return communicator_ == nullptr ? ncclSuccess : nccl_.count(native(communicator_), &ranks);
}

void NcclCommunicator::give_up(const std::string& message) {
  has_failed_ = true;
  fail(ErrorCode::kRanks, message);
}

std::string NcclCommunicator::describe(int result) {
  const std::scoped_lock lock(mutex_);
  const char* const told = nccl_.get_last_error(native(communicator_));
  const std::string last = told == nullptr ? "" : told;
  // NCCL reads the variable once in a process, so it cannot be set now.
  const bool is_multicast = last.find("NVLS") != std::string::npos;
  return fmt::format(
      "NCCL {} reports: {}{}{}; {}", library_.version_text(),
      nccl_.get_error_string(static_cast<ncclResult_t>(result)), last.empty() ? "" : ": ", last,
      is_multicast ? "NCCL_NVLS_ENABLE=0 in the environment of every rank makes it do "
                     "without multicast, which no exact sum needs"
                   : "NCCL_DEBUG=INFO in the environment makes it say more");
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
  if (memory.empty() || !library_.has_windows()) return;
  call("ncclCommWindowRegister", [&](ncclComm_t c) {
    return nccl_.register_window(c, memory.data(), memory.size(), given_as<ncclWindow_t>(),
                                 NCCL_WIN_COLL_SYMMETRIC);
  });
  const std::scoped_lock lock(mutex_);
  lacks_windows_ = lacks_windows_ || given_ == nullptr;  // for all ranks alike
  if (given_ != nullptr) windows_.push_back(given_);
}

void NcclCommunicator::deregister_memory() noexcept {
  const CudaCurrentDevice current(device_.ordinal(), std::nothrow);
  const std::scoped_lock lock(calling_mutex_, mutex_);
  for (void* const window : std::exchange(windows_, {})) {
    if (communicator_ == nullptr) continue;  // it went with the communicator
    (void)nccl_.deregister_window(native(communicator_), static_cast<ncclWindow_t>(window));
  }
}

std::vector<std::string> NcclCommunicator::notes() {
  std::vector<std::string> all;
  if (std::string limit = library_.limit(); !limit.empty()) all.push_back(std::move(limit));
  const std::scoped_lock lock(mutex_);
  if (lacks_windows_)
    all.push_back(fmt::format(
        "NCCL {} makes no windows on this machine, which takes multicast or memory that the GPUs "
        "share: multiprocessors do the gathers",
        library_.version_text()));
  return all;
}

// Not beside a call: the question also ends what the call begins, and the caller asks itself.
std::string NcclCommunicator::failure() {
  ncclResult_t result = ncclSuccess;
  const std::unique_lock no_call(calling_mutex_, std::try_to_lock);
  if (!no_call) return "";
  {
    const std::scoped_lock lock(mutex_);
    if (communicator_ == nullptr) return "";
    const ncclResult_t asked = nccl_.get_async_error(native(communicator_), &result);
    if (asked != ncclSuccess) result = asked;
  }
  return result == ncclSuccess || result == ncclInProgress ? "" : describe(result);
}

// A call that blocks comes back when the operations before it end, which only the abort brings
// about. All other calls return at once, and are let to.
void NcclCommunicator::abort() noexcept {
  const CudaCurrentDevice current(device_.ordinal(), std::nothrow);
  std::unique_lock calling(calling_mutex_, std::defer_lock);
  const auto end = std::chrono::steady_clock::now() + kCallTime;
  while (!calling.try_lock() && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(kPollInterval);
  const std::scoped_lock lock(mutex_);
  if (communicator_ == nullptr) return;
  (void)nccl_.abort(native(std::exchange(communicator_, nullptr)));
}

}  // namespace sluice
