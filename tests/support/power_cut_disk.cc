#include "tests/support/power_cut_disk.h"

#include <algorithm>
#include <cstring>

#include <sluice/error.h>

namespace sluice::test {
namespace {

constexpr std::uint64_t kSectorBytes = 512;

}  // namespace

int PowerCutDisk::add_file(std::uint64_t size_bytes) {
  files_.push_back({std::vector<std::byte>(size_bytes), std::vector<std::byte>(size_bytes), {}});
  return static_cast<int>(files_.size()) - 1;
}

void PowerCutDisk::complete_at_once(std::uint64_t requests) {
  is_at_once_ = true;
  left_ = requests;
}

void PowerCutDisk::submit(std::span<IoRequest* const> requests) {
  for (IoRequest* request : requests) waiting_.push_back({request, sequence_});
  while (is_at_once_ && !waiting_.empty()) {
    if (left_ == 0) {
      kill();  // as long as the requests are there
      throw PowerCut();
    }
    --left_;
    run_one();
  }
}

bool PowerCutDisk::run_one() {
  if (waiting_.empty()) return false;
  const auto chosen = waiting_.begin() + static_cast<std::ptrdiff_t>(random_() % waiting_.size());
  const Waiting next = *chosen;
  waiting_.erase(chosen);
  complete(next);
  return true;
}

void PowerCutDisk::complete(const Waiting& waiting) {
  IoRequest& request = *waiting.request;
  File& file = file_of(request);
  request.error = failing_.first == request.kind ? std::exchange(failing_.second, 0) : 0;
  if (request.error != 0) return request.on_complete(request);
  request.transferred_bytes = request.length_bytes;
  if (request.kind == IoKind::kRead) {
    std::memcpy(request.data, file.now.data() + request.offset_bytes, request.length_bytes);
  } else if (request.kind == IoKind::kWrite) {
    if (!loses_writes_) write(request);
  } else {
    for (const Write& write : file.unflushed) {
      if (write.sequence > waiting.sequence) continue;
      std::ranges::copy(write.data,
                        file.durable.begin() + static_cast<std::ptrdiff_t>(write.offset_bytes));
    }
    std::erase_if(file.unflushed,
                  [&](const Write& write) { return write.sequence <= waiting.sequence; });
  }
  request.on_complete(request);
}

void PowerCutDisk::write(const IoRequest& request) {
  File& file = file_of(request);
  SLUICE_CHECK(request.offset_bytes + request.length_bytes <= file.now.size(),
               "writes stay inside their file");
  std::memcpy(file.now.data() + request.offset_bytes, request.data, request.length_bytes);
  file.unflushed.push_back({.offset_bytes = request.offset_bytes,
                            .data = {request.data, request.data + request.length_bytes},
                            .sequence = ++sequence_});
}

void PowerCutDisk::put(int file, std::uint64_t offset_bytes, std::span<const std::byte> data) {
  File& target = files_[static_cast<std::size_t>(file)];
  for (auto* bytes : {&target.now, &target.durable})
    std::ranges::copy(data, bytes->begin() + static_cast<std::ptrdiff_t>(offset_bytes));
}

void PowerCutDisk::flip(int file, std::uint64_t offset_bytes, std::uint8_t bits) {
  File& flipped = files_[static_cast<std::size_t>(file)];
  flipped.now[offset_bytes] ^= std::byte{bits};
  flipped.durable[offset_bytes] ^= std::byte{bits};
}

// `mode`: 0 drops, 1 keeps, 2 keeps a beginning, 3 any sectors.
void PowerCutDisk::keep_some(std::vector<std::byte>& target, const Write& write,
                             std::uint64_t mode) {
  const std::uint64_t torn_at = random_() % (write.data.size() + 1);
  for (std::uint64_t at = 0; at < write.data.size(); at += kSectorBytes) {
    const bool keeps = mode == 1 || (mode == 2 && at < torn_at) || (mode == 3 && random_() % 2);
    if (!keeps) continue;
    const std::uint64_t length = std::min(kSectorBytes, write.data.size() - at);
    std::memcpy(target.data() + write.offset_bytes + at, write.data.data() + at, length);
  }
}

void PowerCutDisk::kill() {
  for (const Waiting& waiting : waiting_) {
    const IoRequest& request = *waiting.request;
    if (request.kind != IoKind::kWrite) continue;
    File& file = file_of(request);
    const Write all{.offset_bytes = request.offset_bytes,
                    .data = {request.data, request.data + request.length_bytes}};
    keep_some(file.now, all, random_() % 4);
    // As its own range is now: torn or not, it is one write more that has not been flushed.
    const auto begin = file.now.begin() + static_cast<std::ptrdiff_t>(all.offset_bytes);
    file.unflushed.push_back({.offset_bytes = all.offset_bytes,
                              .data = {begin, begin + static_cast<std::ptrdiff_t>(all.data.size())},
                              .sequence = ++sequence_});
  }
  waiting_.clear();
}

void PowerCutDisk::cut() {
  kill();
  const std::uint64_t all_alike = random_() % 8;  // often one fate for all, else each its own
  for (File& file : files_) {
    for (const Write& write : file.unflushed)
      keep_some(file.durable, write, all_alike < 4 ? all_alike : random_() % 4);
    file.unflushed.clear();
    file.now = file.durable;
  }
}

}  // namespace sluice::test
