// SHA-256, as published in FIPS 180-4.
//
// Thread rule: one thread per object. Any thread may call file_sha256().
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sluice/checkpoint.h>

struct evp_md_ctx_st;

namespace sluice {

class Sha256 {
 public:
  Sha256();

  void update(std::span<const std::byte> bytes);
  // Returns the hash as 64 hexadecimal digits. After this call, update() must not be called.
  std::string hex();

 private:
  struct FreeContext {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, FreeContext> context_;
};

// Returns the hash of each range of `file`, for SaveOptions::sha256. The function reads the file
// only once, even if ranges overlap.
// Fails with kDamaged if the file is too short. Fails with kIo or another error if the file cannot
// be read. The message names the file and the place that cannot be read.
std::vector<std::string> file_sha256(const FileRanges& file);

}  // namespace sluice
