#include "tools/gpt/train/kernel_agreement.h"

#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include "io/checksum.h"

namespace sluice {

void require_same_kernels(Engine& engine, const ComputeDevice& device) {
  if (engine.rank_count() == 1 || !device.is_host()) return;
  const std::string own = describe(device.matrix_kernels());
  // 32 of 64 bits, so that a double has all of them.
  const auto mark = static_cast<double>(checksum(std::as_bytes(std::span(own))) >> 32);
  const std::vector<double> marks = engine.exchange(mark);
  for (std::size_t rank = 0; rank < marks.size(); ++rank) {
    if (marks[rank] != mark)
      throw Error(
          ErrorCode::kRanks,
          fmt::format("rank {} of {}: matrix products are by {} here, and by others on rank "
                      "{}; set run.matmul, and with OpenBLAS OPENBLAS_CORETYPE, to what all "
                      "hosts have",
                      engine.rank(), marks.size(), own, rank));
  }
}

}  // namespace sluice
