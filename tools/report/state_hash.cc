#include "tools/report/state_hash.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/plan/layout.h"

namespace sluice {
namespace {

constexpr std::uint64_t kChunkElements = 64 << 10;

class Sha256 {
 public:
  Sha256() { check(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr)); }

  void update(std::span<const std::byte> bytes) {
    check(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()));
  }

  std::string hex() {
    std::array<unsigned char, 32> digest{};
    check(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr));
    return fmt::format("{:02x}", fmt::join(digest, ""));
  }

 private:
  static void check(int status) {
    if (status != 1) throw Error(ErrorCode::kInternal, "SHA-256 of the state failed");
  }

  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_{EVP_MD_CTX_new(),
                                                                   &EVP_MD_CTX_free};
};

}  // namespace

std::string state_sha256(Engine& engine) {
  Sha256 hash;
  std::array<std::byte, 8> step{};
  for (std::size_t i = 0; i < step.size(); ++i)
    step[i] = static_cast<std::byte>(engine.applied_step() >> (8 * i));
  hash.update(step);
  std::vector<std::byte> chunk(kChunkElements * sizeof(float));
  for (const TensorPlace& tensor : engine.layout().tensors()) {
    for (const StateKind kind :
         {StateKind::kParameter, StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
      const std::uint64_t element_bytes = kind == StateKind::kParameter
                                              ? engine.layout().format().parameter_bytes()
                                              : sizeof(float);
      const bool is_moment = kind == StateKind::kExpAvg || kind == StateKind::kExpAvgSq;
      const bool is_absent = is_moment && engine.layout().unit(tensor.unit).is_frozen;
      if (is_absent) std::ranges::fill(chunk, std::byte{0});  // hashed as zeros
      for (std::uint64_t first = 0; first < tensor.element_count; first += kChunkElements) {
        const std::uint64_t count = std::min(kChunkElements, tensor.element_count - first);
        const auto bytes = std::span(chunk).first(count * element_bytes);
        if (!is_absent) engine.read_state(tensor.id, kind, first, bytes);
        hash.update(bytes);
      }
    }
  }
  return hash.hex();
}

}  // namespace sluice
