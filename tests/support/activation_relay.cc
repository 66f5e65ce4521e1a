#include "tests/support/activation_relay.h"

namespace sluice::test {
namespace {

std::byte expected_byte(std::uint64_t key, std::uint64_t index) {
  std::uint64_t value = (key + index / 8) * 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<std::byte>((value ^ (value >> 32)) >> (index % 8 * 8));
}

}  // namespace

std::uint64_t ActivationRelay::key_of(const ActivationRef& ref) const {
  const std::uint64_t walk = key_ * 1000 + walk_number_;
  return (((walk * 1000 + ref.boundary) * 1000 + ref.micro_batch) * 2 +
          (ref.kind == ActivationKind::kGradient ? 1 : 0))
         << 24;
}

void ActivationRelay::fill(ActivationLease lease, const ActivationRef& ref, const Stream& stream) {
  device_.launch(stream.id(),
                 [data = lease.data(), key = key_of(ref), bytes = boundary_bytes_[ref.boundary]] {
                   for (std::uint64_t i = 0; i < bytes; ++i) data[i] = expected_byte(key, i);
                 });
}

void ActivationRelay::check(ActivationLease lease, const ActivationRef& ref, const Stream& stream) {
  device_.launch(stream.id(), [this, data = lease.data(), key = key_of(ref),
                               bytes = boundary_bytes_[ref.boundary]] {
    bool is_right = true;
    for (std::uint64_t i = 0; i < bytes && is_right; ++i)
      is_right = data[i] == expected_byte(key, i);
    ++seen_;
    if (!is_right) ++wrong_;
  });
}

}  // namespace sluice::test
