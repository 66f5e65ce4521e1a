#include "tools/gpt/model/slow_products.h"

#include <utility>

#include <fmt/format.h>

namespace sluice::gpt {
namespace {

const char* text_of(Form form) {
  switch (form) {
    case Form::kAB: break;
    case Form::kABt: return "A B^T";
    case Form::kAtB: return "A^T B";
  }
  return "A B";
}

}  // namespace

void SlowProducts::note(const Product& p, DType type) {
  std::string text = fmt::format(
      "matrix product {} of [{}, {}], summed over {}, rows {}, {} and {} apart, {} to {}: cuBLASLt "
      "has no algorithm, and the plain kernel that computes it is 100 to 1000 times slower; choose "
      "sizes that are multiples of 8",
      text_of(p.form), p.m, p.n, p.k, p.a_stride, p.b_stride, p.result_stride, name_of(type),
      name_of(p.result_type));
  if (known_.insert(text).second) new_.push_back(std::move(text));
}

std::vector<std::string> SlowProducts::take() {
  return std::exchange(new_, {});
}

}  // namespace sluice::gpt
