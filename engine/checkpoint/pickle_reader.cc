#include "engine/checkpoint/pickle_reader.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <optional>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {
namespace {

constexpr std::array<std::string_view, 9> kNames{"torch._utils._rebuild_tensor_v2",
                                                 "torch._utils._rebuild_parameter",
                                                 "collections.OrderedDict",
                                                 "torch.FloatStorage",
                                                 "torch.DoubleStorage",
                                                 "torch.HalfStorage",
                                                 "torch.BFloat16Storage",
                                                 "torch.LongStorage",
                                                 "torch.IntStorage"};
constexpr std::size_t kStackMax = 1 << 16;
// The reader copies the keys, names, shapes and strides of tensors. A value may be named again and
// again with few bytes, so that the copies could take far more memory than the file has bytes.
constexpr std::uint64_t kCopiedBytesMax = 64_MiB;
constexpr std::uint64_t kExtentMax = std::uint64_t{1} << 48;

class PickleMachine {
 public:
  PickleMachine(std::string_view bytes, const std::string& path) : bytes_(bytes), path_(path) {}

  PickleObject run() {
    for (;;) {
      opcode_at_ = at_;
      const auto opcode = static_cast<unsigned char>(take(1)[0]);
      if (opcode == '.') return {all_, pop().get()};
      if (stack_.size() > kStackMax) fail("more values than a file of tensors has");
      if (!push_constant(opcode) && !remember(opcode) && !collect(opcode) && !build(opcode))
        fail(fmt::format("opcode {:#04x}, expected one that files of tensors use", opcode));
    }
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\": pickle, byte {}: {}; nothing of it has been executed; write "
                            "the file again, such as with DeepSpeed's ds_to_universal",
                            path_, opcode_at_, why));
  }

  std::string_view take(std::uint64_t count) {
    if (count > bytes_.size() - at_) fail("it ends in the middle of an opcode");
    const std::string_view taken = bytes_.substr(at_, count);
    at_ += count;
    return taken;
  }
  template <class Number>
  Number number() {
    Number value{};
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string line() {
    const std::size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) fail("it ends in the middle of a name");
    const std::string text(bytes_.substr(at_, end - at_));
    at_ = end + 1;
    return text;
  }

  template <class Value>
  void push(Value value) {
    stack_.push_back(std::make_shared<PickleValue>(PickleValue{std::move(value)}));
    all_->objects.push_back(stack_.back());
  }
  PickleObject pop() {
    const bool is_empty = stack_.size() <= (marks_.empty() ? 0 : marks_.back());
    if (is_empty) fail("a value is missing");
    PickleObject top = std::move(stack_.back());
    stack_.pop_back();
    return top;
  }
  // The values since the last mark.
  std::vector<PickleObject> pop_marked() {
    if (marks_.empty()) fail("a mark is missing");
    const auto from = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<PickleObject> values(std::make_move_iterator(from),
                                     std::make_move_iterator(stack_.end()));
    stack_.erase(from, stack_.end());
    marks_.pop_back();
    return values;
  }
  template <class Value>
  Value& as(const PickleObject& object, const char* expected) const {
    Value* const value = std::get_if<Value>(&object->value);
    if (value == nullptr) fail(fmt::format("expected {}", expected));
    return *value;
  }

  bool push_constant(unsigned char opcode);
  bool remember(unsigned char opcode);
  bool collect(unsigned char opcode);
  bool build(unsigned char opcode);
  void count_copied(std::uint64_t bytes) {
    copied_bytes_ += bytes;
    if (copied_bytes_ > kCopiedBytesMax)
      fail(fmt::format("its tensors have more than {} B of keys and shapes", kCopiedBytesMax));
  }
  static std::uint64_t copied_bytes(const PickleStorage& storage) {
    return sizeof storage + storage.type.size() + storage.key.size();
  }
  void push_tuple(std::size_t count);
  void set_items(const PickleObject& target, const std::vector<PickleObject>& items);
  void push_global();
  void push_storage();
  void reduce();
  void rebuild_tensor(const PickleSequence& arguments);
  std::vector<std::uint64_t> extents(const PickleObject& object);
  std::uint64_t count_of(const PickleObject& object) const;

  // Empties every object before the first one dies. Otherwise the end of a value would end those in
  // it, and so on, through as many levels as a file has; and values that have each other would
  // stay.
  struct Objects {
    Objects() = default;
    Objects(const Objects&) = delete;
    Objects& operator=(const Objects&) = delete;
    ~Objects() {
      for (const PickleObject& object : objects) object->value = PickleNone{};
    }
    std::vector<PickleObject> objects;
  };

  std::string_view bytes_;
  const std::string& path_;
  std::shared_ptr<Objects> all_ = std::make_shared<Objects>();
  std::size_t at_ = 0;
  std::size_t opcode_at_ = 0;
  std::uint64_t copied_bytes_ = 0;
  std::vector<PickleObject> stack_;
  std::vector<std::size_t> marks_;
  std::map<std::uint32_t, PickleObject> memo_;
};

bool PickleMachine::push_constant(unsigned char opcode) {
  switch (opcode) {
    case 0x80: (void)take(1); return true;                               // PROTO
    case 0x95: (void)take(8); return true;                               // FRAME
    case 'N': push(PickleNone{}); return true;                           // NONE
    case 0x88: push(true); return true;                                  // NEWTRUE
    case 0x89: push(false); return true;                                 // NEWFALSE
    case 'J': push(std::int64_t{number<std::int32_t>()}); return true;   // BININT
    case 'K': push(std::int64_t{number<std::uint8_t>()}); return true;   // BININT1
    case 'M': push(std::int64_t{number<std::uint16_t>()}); return true;  // BININT2
    case 0x8a: {                                                         // LONG1
      const std::string_view digits = take(number<std::uint8_t>());
      if (digits.size() > sizeof(std::int64_t)) fail("a number of more than 64 bits");
      std::int64_t value =
          !digits.empty() && (static_cast<unsigned char>(digits.back()) & 0x80) != 0 ? -1 : 0;
      std::memcpy(&value, digits.data(), digits.size());
      push(value);
      return true;
    }
    case 'G':  // BINFLOAT, big-endian
      push(std::bit_cast<double>(__builtin_bswap64(number<std::uint64_t>())));
      return true;
    case 'X': push(std::string(take(number<std::uint32_t>()))); return true;  // BINUNICODE
    case 0x8c: push(std::string(take(number<std::uint8_t>()))); return true;  // SHORT_BINUNICODE
    default: return false;
  }
}

bool PickleMachine::remember(unsigned char opcode) {
  const auto put = [this](std::uint32_t index) {
    PickleObject top = pop();
    memo_[index] = top;
    stack_.push_back(std::move(top));
  };
  const auto get = [this](std::uint32_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) fail(fmt::format("there is no memo {}", index));
    stack_.push_back(found->second);
  };
  switch (opcode) {
    case 'q': put(number<std::uint8_t>()); return true;                     // BINPUT
    case 'r': put(number<std::uint32_t>()); return true;                    // LONG_BINPUT
    case 0x94: put(static_cast<std::uint32_t>(memo_.size())); return true;  // MEMOIZE
    case 'h': get(number<std::uint8_t>()); return true;                     // BINGET
    case 'j': get(number<std::uint32_t>()); return true;                    // LONG_BINGET
    default: return false;
  }
}

void PickleMachine::push_tuple(std::size_t count) {
  PickleSequence tuple;
  for (std::size_t i = 0; i < count; ++i) tuple.items.push_back(pop());
  std::ranges::reverse(tuple.items);
  push(std::move(tuple));
}

void PickleMachine::set_items(const PickleObject& target, const std::vector<PickleObject>& items) {
  auto& dictionary = as<PickleDictionary>(target, "a dictionary");
  if (items.size() % 2 != 0) fail("a key without a value");
  for (std::size_t i = 0; i < items.size(); i += 2)
    dictionary.items.emplace_back(items[i], items[i + 1]);
}

bool PickleMachine::collect(unsigned char opcode) {
  switch (opcode) {
    case '(': marks_.push_back(stack_.size()); return true;     // MARK
    case '}': push(PickleDictionary{}); return true;            // EMPTY_DICT
    case ')':                                                   // EMPTY_TUPLE
    case ']': push(PickleSequence{}); return true;              // EMPTY_LIST
    case 't': push(PickleSequence{pop_marked()}); return true;  // TUPLE
    case 0x85: push_tuple(1); return true;                      // TUPLE1
    case 0x86: push_tuple(2); return true;                      // TUPLE2
    case 0x87: push_tuple(3); return true;                      // TUPLE3
    case 's': {                                                 // SETITEM
      const PickleObject value = pop();
      const PickleObject key = pop();
      const PickleObject target = pop();
      set_items(target, {key, value});
      stack_.push_back(target);
      return true;
    }
    case 'u': {  // SETITEMS
      const std::vector<PickleObject> items = pop_marked();
      const PickleObject target = pop();
      set_items(target, items);
      stack_.push_back(target);
      return true;
    }
    default: return false;
  }
}

bool PickleMachine::build(unsigned char opcode) {
  switch (opcode) {
    case 'c': push_global(); return true;   // GLOBAL
    case 'Q': push_storage(); return true;  // BINPERSID
    case 'R': reduce(); return true;        // REDUCE
    default: return false;
  }
}

void PickleMachine::push_global() {
  const std::string module = line();
  const std::string name = module + "." + line();
  if (std::ranges::find(kNames, name) == kNames.end())
    fail(fmt::format("the name \"{}\" is none that files of tensors use", name));
  push(PickleGlobal{name});
}

// ("storage", type, key, device, number of elements)
void PickleMachine::push_storage() {
  const PickleObject object = pop();
  const auto& id = as<PickleSequence>(object, "a storage");
  if (id.items.size() != 5 || as<std::string>(id.items[0], "a storage") != "storage")
    fail("expected a storage");
  const std::string& type = as<PickleGlobal>(id.items[1], "a storage's type").name;
  const auto& key = as<std::string>(id.items[2], "a storage's key");
  count_copied(sizeof(PickleStorage) + type.size() + key.size());
  push(PickleStorage{.type = type, .key = key, .element_count = count_of(id.items[4])});
}

void PickleMachine::reduce() {
  const PickleObject tuple = pop();
  const PickleObject function = pop();
  const auto& arguments = as<PickleSequence>(tuple, "arguments");
  const std::string& name = as<PickleGlobal>(function, "a name").name;
  if (name == "torch._utils._rebuild_tensor_v2") return rebuild_tensor(arguments);
  if (name == "collections.OrderedDict" && arguments.items.empty()) return push(PickleDictionary{});
  if (name == "torch._utils._rebuild_parameter" && !arguments.items.empty()) {
    const auto& tensor = as<PickleTensor>(arguments.items[0], "a tensor");
    count_copied(copied_bytes(tensor.storage) +
                 sizeof(std::uint64_t) * (tensor.shape.size() + tensor.strides.size()));
    return push(tensor);
  }
  fail(fmt::format("a call of \"{}\" that files of tensors do not have", name));
}

// (storage, first element, shape, strides, ...)
void PickleMachine::rebuild_tensor(const PickleSequence& arguments) {
  if (arguments.items.size() < 4) fail("a tensor with too few fields");
  const auto& storage = as<PickleStorage>(arguments.items[0], "a storage");
  count_copied(copied_bytes(storage));
  push(PickleTensor{.storage = storage,
                    .first_element = count_of(arguments.items[1]),
                    .shape = extents(arguments.items[2]),
                    .strides = extents(arguments.items[3])});
}

std::vector<std::uint64_t> PickleMachine::extents(const PickleObject& object) {
  const std::vector<PickleObject>& items = as<PickleSequence>(object, "a tuple of numbers").items;
  count_copied(items.size() * sizeof(std::uint64_t));
  std::vector<std::uint64_t> all;
  all.reserve(items.size());
  for (const PickleObject& item : items) all.push_back(count_of(item));
  return all;
}

std::uint64_t PickleMachine::count_of(const PickleObject& object) const {
  const auto value = as<std::int64_t>(object, "a number");
  if (value < 0 || static_cast<std::uint64_t>(value) > kExtentMax)
    fail(fmt::format("the number {} is out of range", value));
  return static_cast<std::uint64_t>(value);
}

}  // namespace

PickleObject read_pickle(std::string_view bytes, const std::string& path) {
  return PickleMachine(bytes, path).run();
}

}  // namespace sluice
