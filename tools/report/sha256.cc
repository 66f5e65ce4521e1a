#include "tools/report/sha256.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/unique_fd.h"

namespace sluice {
namespace {

constexpr std::uint64_t kReadBytes = 1_MiB;

void check_digest(int status) {
  if (status != 1) throw Error(ErrorCode::kInternal, "SHA-256 failed");
}

[[noreturn]] void throw_unreadable(const FileRange& range, ErrorCode code, const std::string& why) {
  throw Error(code, fmt::format("SHA-256 of \"{}\" [{}, +{}): {}; check the drive", range.path,
                                range.begin_bytes, range.size_bytes, why));
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

std::string file_sha256(const FileRange& range) {
  const UniqueFd file(::open(range.path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) throw_unreadable(range, ErrorCode::kIo, errno_text(errno));
  Sha256 digest;
  std::vector<std::byte> buffer(std::min(kReadBytes, range.size_bytes));
  for (std::uint64_t done = 0; done < range.size_bytes;) {
    const ssize_t got =
        ::pread(file.get(), buffer.data(), std::min(kReadBytes, range.size_bytes - done),
                static_cast<off_t>(range.begin_bytes + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_unreadable(range, ErrorCode::kIo, errno_text(errno));
    if (got == 0)
      throw_unreadable(range, ErrorCode::kDamaged,
                       fmt::format("it ends at byte {}", range.begin_bytes + done));
    digest.update(std::span(buffer).first(static_cast<std::size_t>(got)));
    done += static_cast<std::uint64_t>(got);
  }
  return digest.hex();
}

}  // namespace sluice
