// SHA-256, as published in FIPS 180-4.
//
// Thread rule: one thread per object; file_sha256() is a function of the file system.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include <sluice/checkpoint.h>

struct evp_md_ctx_st;

namespace sluice {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void update(std::span<const std::byte> bytes);
  // 64 hexadecimal digits. Ends the digest.
  std::string hex();

 private:
  evp_md_ctx_st* context_;
};

// For SaveOptions::sha256.
// Fails with: kIo, kDamaged naming the file and the range that cannot be read.
std::string file_sha256(const FileRange& range);

}  // namespace sluice
