// One element of an array of NCCL's types, for the stand-in (fake_nccl.cc), and sums and minima of
// arrays. `type` is an ncclDataType_t. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sluice::test {

float load(int type, const void* data, std::size_t i);
void save(int type, void* data, std::size_t i, float value);
std::size_t size_of(int type);

// Adds the elements of all ranks from `first` on to `sums`, in the reverse order of the ranks.
void add_backwards(const std::vector<const void*>& of_ranks, int type, std::size_t first,
                   std::vector<float>& sums);

// Each of `words` becomes the sum or the minimum of the matching words of all ranks, which all have
// the same number of words.
void reduce_words(const std::vector<const void*>& of_ranks, bool is_sum,
                  std::vector<std::uint64_t>& words);

}  // namespace sluice::test
