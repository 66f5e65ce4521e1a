// Collects notes for the user. Each note names the shape of a matrix product. The plain kernel
// computes the product, because the fast library has no algorithm for the product's shape.
// Thread rule: one thread at a time.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "tools/gpt/model/device_ops.h"

namespace sluice::gpt {

class SlowProducts {
 public:
  // `type` is the type of the factors.
  void note(const Product& product, DType type);
  // Returns the notes that are new since the last call.
  std::vector<std::string> take();

 private:
  std::set<std::string> known_;
  std::vector<std::string> new_;
};

}  // namespace sluice::gpt
