#include "tests/gpu/ranks/fake_nccl_elements.h"

#include <nccl.h>

#include <algorithm>
#include <cstdint>

#include <sluice/dtype.h>

namespace sluice::test {

float load(int type, const void* data, std::size_t i) {
  if (type == ncclFloat32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  return type == ncclBfloat16 ? float_from_bf16(bits) : float_from_fp16(bits);
}
void save(int type, void* data, std::size_t i, float value) {
  if (type == ncclFloat32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<std::uint16_t*>(data)[i] =
        type == ncclBfloat16 ? bf16_from_float(value) : fp16_from_float(value);
  }
}
std::size_t size_of(int type) {
  return type == ncclUint64 ? 8 : type == ncclFloat32 ? 4 : type == ncclInt8 ? 1 : 2;
}
const char* name_of(int type) {
  switch (type) {
    case ncclInt8: return "int8";
    case ncclFloat16: return "float16";
    case ncclBfloat16: return "bfloat16";
    case ncclFloat32: return "float32";
    case ncclUint64: return "uint64";
    default: return "elements of another type";
  }
}

void add_backwards(const std::vector<const void*>& of_ranks, int type, std::size_t first,
                   std::vector<float>& sums) {
  for (std::size_t i = 0; i < sums.size(); ++i)
    for (std::size_t rank = of_ranks.size(); rank-- > 0;)
      sums[i] += load(type, of_ranks[rank], first + i);
}

void reduce_words(const std::vector<const void*>& of_ranks, bool is_sum,
                  std::vector<std::uint64_t>& words) {
  std::ranges::fill(words, is_sum ? 0 : ~std::uint64_t{0});
  for (const void* const of_rank : of_ranks) {
    const auto* const said = static_cast<const std::uint64_t*>(of_rank);
    for (std::size_t i = 0; i < words.size(); ++i)
      words[i] = is_sum ? words[i] + said[i] : std::min(words[i], said[i]);
  }
}

}  // namespace sluice::test
