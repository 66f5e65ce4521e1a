// The account of a device's memory. The account has the capacity of the memory, and the bytes in
// use for each purpose. The ledger allocates no memory. Every device asks the ledger before an
// allocation. So all devices report a lack of memory with the same message. The ledger is not
// thread-safe. The device's lock guards the ledger.
// Invariant: the sum of the entries never exceeds the capacity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include <sluice/error.h>

namespace sluice {

class MemoryLedger {
 public:
  explicit MemoryLedger(std::uint64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  // Fails with kOutOfMemory if `size_bytes` more bytes do not fit. The message lists the request
  // and all memory that is taken.
  void check_fits(std::uint64_t size_bytes, std::string_view purpose) const;

  // Returns the error of check_fits(). A device uses this error if an allocation fails although
  // check_fits() has passed. `why` is the device's own explanation.
  Error refusal(std::uint64_t size_bytes, std::string_view purpose, std::string_view why) const;

  // Requires: check_fits() has passed, and `memory` is not in the ledger.
  void add(const std::byte* memory, std::uint64_t size_bytes, std::string_view purpose);
  // Requires: `memory` is in the ledger.
  void remove(const std::byte* memory);

  std::uint64_t capacity_bytes() const { return capacity_bytes_; }
  std::uint64_t taken_bytes() const { return taken_bytes_; }

 private:
  struct Entry {
    std::uint64_t size_bytes;
    std::string purpose;
  };

  std::string describe_taken() const;

  std::uint64_t capacity_bytes_;
  std::uint64_t taken_bytes_ = 0;
  std::unordered_map<const std::byte*, Entry> entries_;
};

}  // namespace sluice
