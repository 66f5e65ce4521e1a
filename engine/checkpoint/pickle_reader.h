// Reads pickles that torch.save() has written. The reader knows only the few opcodes and names that
// dictionaries of tensors use. Any other opcode or name is an error. The reader executes nothing.
//
// Thread rule: plain data and a pure function.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace sluice {

struct PickleValue;
using PickleObject = std::shared_ptr<PickleValue>;

struct PickleNone {};
struct PickleGlobal {
  std::string name;  // "torch.FloatStorage"
};
struct PickleSequence {
  std::vector<PickleObject> items;  // of a tuple or a list
};
struct PickleDictionary {
  std::vector<std::pair<PickleObject, PickleObject>> items;
};
// Describes the archive's entry that contains the elements of a tensor.
struct PickleStorage {
  std::string type;  // "torch.FloatStorage"
  std::string key;
  std::uint64_t element_count = 0;
};
struct PickleTensor {
  PickleStorage storage;
  std::uint64_t first_element = 0;
  std::vector<std::uint64_t> shape;
  std::vector<std::uint64_t> strides;
};

struct PickleValue {
  std::variant<PickleNone, bool, std::int64_t, double, std::string, PickleGlobal, PickleSequence,
               PickleDictionary, PickleStorage, PickleTensor>
      value;
};

// Returns the pickle's value. The values in it live as long as the returned object or a copy of it.
// Error messages name `path`.
// Fails with kInput if the pickle is damaged, or has an unknown opcode or name. The message gives
// the opcode or the name, and the byte offset.
PickleObject read_pickle(std::string_view bytes, const std::string& path);

}  // namespace sluice
