// SHA-256 (FIPS 180-4), written from the standard. The code is an oracle for the hashes that the
// tools compute with OpenSSL. The whole message is in memory. The functions are pure.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace sluice::test {

namespace sha256_internal {

// Returns the first 32 bits of the fractional part of `root`. A long double has enough bits,
// because the roots are below 18.
inline std::uint32_t fraction_bits(long double root) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(root * 0x1p32L));
}

inline std::vector<std::uint32_t> primes(std::size_t count) {
  std::vector<std::uint32_t> found;
  for (std::uint32_t candidate = 2; found.size() < count; ++candidate) {
    bool is_prime = true;
    for (const std::uint32_t prime : found) is_prime = is_prime && candidate % prime != 0;
    if (is_prime) found.push_back(candidate);
  }
  return found;
}

inline void compress(std::array<std::uint32_t, 8>& hash, const unsigned char* block) {
  static const std::vector<std::uint32_t> constants = [] {
    std::vector<std::uint32_t> roots;
    for (const std::uint32_t prime : primes(64))
      roots.push_back(fraction_bits(std::cbrt(static_cast<long double>(prime))));
    return roots;
  }();
  std::array<std::uint32_t, 64> w{};
  for (std::size_t t = 0; t < 64; ++t) {
    if (t < 16) {
      w[t] = static_cast<std::uint32_t>(block[4 * t]) << 24 | block[4 * t + 1] << 16 |
             block[4 * t + 2] << 8 | block[4 * t + 3];
    } else {
      const std::uint32_t x = w[t - 15];
      const std::uint32_t y = w[t - 2];
      w[t] = w[t - 16] + (std::rotr(x, 7) ^ std::rotr(x, 18) ^ x >> 3) + w[t - 7] +
             (std::rotr(y, 17) ^ std::rotr(y, 19) ^ y >> 10);
    }
  }
  auto [a, b, c, d, e, f, g, h] = hash;
  for (std::size_t t = 0; t < 64; ++t) {
    const std::uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                             ((e & f) ^ (~e & g)) + constants[t] + w[t];
    const std::uint32_t t2 =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = std::exchange(g, std::exchange(f, std::exchange(e, d + t1)));
    d = std::exchange(c, std::exchange(b, std::exchange(a, t1 + t2)));
  }
  const std::array<std::uint32_t, 8> sum{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) hash[i] += sum[i];
}

}  // namespace sha256_internal

inline std::string sha256_hex(std::vector<std::byte> message) {
  const std::uint64_t bits = 8 * message.size();
  message.push_back(std::byte{0x80});
  while (message.size() % 64 != 56) message.push_back(std::byte{0});
  for (int shift = 56; shift >= 0; shift -= 8)
    message.push_back(static_cast<std::byte>(bits >> shift));
  std::array<std::uint32_t, 8> hash{};
  const auto prime = sha256_internal::primes(8);
  for (std::size_t i = 0; i < 8; ++i)
    hash[i] = sha256_internal::fraction_bits(std::sqrt(static_cast<long double>(prime[i])));
  for (std::size_t offset = 0; offset < message.size(); offset += 64)
    sha256_internal::compress(hash,
                              reinterpret_cast<const unsigned char*>(message.data()) + offset);
  std::string text;
  for (const std::uint32_t word : hash) text += fmt::format("{:08x}", word);
  return text;
}

}  // namespace sluice::test
