#include "tools/report/sha256.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/file_flush.h"
#include "base/unique_fd.h"

namespace sluice {
namespace {

constexpr std::uint64_t kReadBytes = 1_MiB;

void check_digest(int status) {
  if (status != 1) throw Error(ErrorCode::kInternal, "SHA-256 failed");
}

[[noreturn]] void throw_unreadable(const std::string& path, std::uint64_t offset_bytes, int error) {
  throw Error(file_error_code(error, ErrorCode::kIo),
              fmt::format("SHA-256 of \"{}\", from byte {} on: {}; {}", path, offset_bytes,
                          errno_text(error), file_remedy(error)));
}

}  // namespace

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  check_digest(context_ == nullptr ? 0 : EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr));
}

void Sha256::FreeContext::operator()(evp_md_ctx_st* context) const {
  EVP_MD_CTX_free(context);
}

void Sha256::update(std::span<const std::byte> bytes) {
  check_digest(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()));
}

std::string Sha256::hex() {
  std::array<unsigned char, 32> digest{};
  check_digest(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr));
  return fmt::format("{:02x}", fmt::join(digest, ""));
}

std::vector<std::string> file_sha256(const FileRanges& file) {
  const UniqueFd opened(::open(file.path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!opened) throw_unreadable(file.path, 0, errno);
  std::uint64_t end = 0;
  for (const FileRanges::Range& range : file.ranges)
    end = std::max(end, range.begin_bytes + range.size_bytes);
  std::vector<Sha256> digests(file.ranges.size());
  std::vector<std::byte> buffer(std::min(kReadBytes, end));
  for (std::uint64_t at = 0; at < end;) {
    const ssize_t got = ::pread(opened.get(), buffer.data(), std::min(kReadBytes, end - at),
                                static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_unreadable(file.path, at, errno);
    if (got == 0)
      throw Error(ErrorCode::kDamaged,
                  fmt::format("SHA-256 of \"{}\": it ends at byte {}, and should have {}; check "
                              "the drive",
                              file.path, at, end));
    const std::uint64_t next = at + static_cast<std::uint64_t>(got);
    for (std::size_t i = 0; i < digests.size(); ++i) {
      const FileRanges::Range& range = file.ranges[i];
      const std::uint64_t from = std::max(at, range.begin_bytes);
      const std::uint64_t to = std::min(next, range.begin_bytes + range.size_bytes);
      if (from < to) digests[i].update(std::span(buffer).subspan(from - at, to - from));
    }
    at = next;
  }
  std::vector<std::string> texts;
  for (Sha256& digest : digests) texts.push_back(digest.hex());
  return texts;
}

}  // namespace sluice
