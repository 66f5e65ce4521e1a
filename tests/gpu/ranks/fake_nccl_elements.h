// These functions load and save single elements of arrays of NCCL's types. Other functions compute
// sums and minima of arrays. All functions are for the stand-in (fake_nccl.cc). `type` is an
// ncclDataType_t. The functions are pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sluice::test {

float load(int type, const void* data, std::size_t i);
void save(int type, void* data, std::size_t i, float value);
std::size_t size_of(int type);
const char* name_of(int type);

// For each i, the function adds all ranks' elements with index first + i to sums[i]. The additions
// run in the reverse order of the ranks.
void add_backwards(const std::vector<const void*>& of_ranks, int type, std::size_t first,
                   std::vector<float>& sums);

// words[i] becomes the sum or the minimum of word i over all ranks. All ranks have the same number
// of words.
void reduce_words(const std::vector<const void*>& of_ranks, bool is_sum,
                  std::vector<std::uint64_t>& words);

}  // namespace sluice::test
