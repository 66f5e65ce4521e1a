#include <mpi.h>

#include <cstdlib>

#include "gpu/ranks/message_port.h"

namespace sluice {
namespace {

std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  return {text, static_cast<std::size_t>(length)};
}

class PluginPort final : public MessagePort {
 public:
  PluginPort() {
    int number = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &number);
    rank_ = static_cast<std::uint32_t>(number);
    MPI_Comm_size(MPI_COMM_WORLD, &number);
    rank_count_ = static_cast<std::uint32_t>(number);
    // Each call returns its failure, and Sluice words the message.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    int* bound = nullptr;
    int is_set = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&bound), &is_set);
    tag_max_ = is_set != 0 ? *bound : 32767;
  }

  ~PluginPort() override {
    if (host_ != MPI_COMM_NULL) MPI_Comm_free(&host_);
    MPI_Finalize();
  }

  std::string version() const override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
    int length = 0;
    MPI_Get_library_version(text, &length);
    const std::string all(text, static_cast<std::size_t>(length));
    return all.substr(0, all.find(','));
  }
  std::uint32_t rank() const override { return rank_; }
  std::uint32_t rank_count() const override { return rank_count_; }
  int tag_max() const override { return tag_max_; }

  std::uint32_t start_send(const std::byte* data, std::uint64_t size_bytes, std::uint32_t peer,
                           int tag) override {
    const std::uint32_t slot = free_slot();
    keep(MPI_Isend(data, static_cast<int>(size_bytes), MPI_BYTE, static_cast<int>(peer), tag,
                   MPI_COMM_WORLD, &requests_[slot]));
    return slot;
  }
  std::uint32_t start_receive(std::byte* data, std::uint64_t size_bytes, std::uint32_t peer,
                              int tag) override {
    const std::uint32_t slot = free_slot();
    wanted_bytes_[slot] = static_cast<int>(size_bytes);
    keep(MPI_Irecv(data, static_cast<int>(size_bytes), MPI_BYTE, static_cast<int>(peer), tag,
                   MPI_COMM_WORLD, &requests_[slot]));
    return slot;
  }

  void test(std::vector<std::uint32_t>& ended, std::string& failure) override {
    indices_.resize(requests_.size());
    statuses_.resize(requests_.size());
    int count = 0;
    const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                                  indices_.data(), statuses_.data());
    keep(code);
    if (count != MPI_UNDEFINED) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
        const auto slot = static_cast<std::uint32_t>(indices_[i]);
        if (code == MPI_SUCCESS) require_whole(slot, statuses_[i]);
        free_.push_back(slot);
        ended.push_back(slot);
      }
    }
    if (!failure_.empty()) failure = "MPI reports: " + failure_;
  }

  std::vector<std::uint32_t> host_ranks() override {
    if (MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, static_cast<int>(rank_),
                            MPI_INFO_NULL, &host_) != MPI_SUCCESS)
      return {};
    MPI_Comm_set_errhandler(host_, MPI_ERRORS_RETURN);
    int count = 0;
    MPI_Comm_size(host_, &count);
    std::vector<std::uint32_t> ranks(static_cast<std::size_t>(count));
    if (MPI_Allgather(&rank_, 1, MPI_UINT32_T, ranks.data(), 1, MPI_UINT32_T, host_) != MPI_SUCCESS)
      return {};
    return ranks;
  }

  bool broadcast_on_host(std::span<std::byte> data) override {
    return MPI_Bcast(data.data(), static_cast<int>(data.size()), MPI_BYTE, 0, host_) == MPI_SUCCESS;
  }

  bool agree_on_host(bool own) override {
    const int answer = own ? 1 : 0;
    int all = 0;
    return MPI_Allreduce(&answer, &all, 1, MPI_INT, MPI_MIN, host_) == MPI_SUCCESS && all == 1;
  }

  [[noreturn]] void abort() override {
    MPI_Abort(MPI_COMM_WORLD, 1);
    std::_Exit(1);
  }

 private:
  static constexpr int kAnySize = -1;

  std::uint32_t free_slot() {
    if (free_.empty()) {
      requests_.push_back(MPI_REQUEST_NULL);
      wanted_bytes_.push_back(kAnySize);
      return static_cast<std::uint32_t>(requests_.size() - 1);
    }
    const std::uint32_t slot = free_.back();
    free_.pop_back();
    wanted_bytes_[slot] = kAnySize;
    return slot;
  }

  // MPI itself refuses only a message that is longer than its place.
  void require_whole(std::uint32_t slot, const MPI_Status& status) {
    if (wanted_bytes_[slot] == kAnySize) return;
    int bytes = 0;
    keep(MPI_Get_count(&status, MPI_BYTE, &bytes));
    if (bytes != wanted_bytes_[slot] && failure_.empty())
      failure_ = "rank " + std::to_string(status.MPI_SOURCE) + " has sent rank " +
                 std::to_string(rank_) + " " + std::to_string(bytes) + " bytes, where " +
                 std::to_string(wanted_bytes_[slot]) +
                 " were expected: the ranks disagree about the sequence; start all with one config "
                 "and model, and let all make the same calls";
  }

  void keep(int code) {
    if (code != MPI_SUCCESS && failure_.empty()) failure_ = error_text(code);
  }

  std::uint32_t rank_ = 0;
  std::uint32_t rank_count_ = 1;
  int tag_max_ = 32767;
  std::vector<MPI_Request> requests_;  // null where no message is under way
  std::vector<std::uint32_t> free_;
  std::vector<int> wanted_bytes_;  // of receives
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::string failure_;
  MPI_Comm host_ = MPI_COMM_NULL;  // the ranks of this host
};

}  // namespace
}  // namespace sluice

extern "C" sluice::MessagePort* SLUICE_OPEN_MPI_PORT(std::string& why) {
  int is_initialized = 0;
  MPI_Initialized(&is_initialized);
  if (is_initialized != 0) {
    why = "the program has started MPI itself; leave that to Sluice";
    return nullptr;
  }
  int provided = 0;
  const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
  if (code != MPI_SUCCESS || provided < MPI_THREAD_SERIALIZED) {
    why = code != MPI_SUCCESS
              ? sluice::error_text(code)
              : "it cannot be called by one thread after another (MPI_THREAD_SERIALIZED)";
    return nullptr;
  }
  return new sluice::PluginPort;
}
