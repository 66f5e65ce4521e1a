// Room in the data files of an opened store for copies that the store was made without. The room is
// kept once a commit names bytes in it. An engine that ends before gives the room back: such as
// when the application finds that it cannot go on from the store.
//
// Thread rule: one thread at a time. No transfers are under way when the object is made or
// destroyed.
#pragma once

#include <cstdint>
#include <span>

#include "engine/store/store_files.h"

namespace sluice {

class ExtraCopies {
 public:
  // Extends the data files. `files` must outlive the object. Fails with the errors of
  // StoreFiles::extend_data().
  ExtraCopies(StoreFiles& files, std::span<const std::uint64_t> data_bytes);
  ExtraCopies(const ExtraCopies&) = delete;
  ExtraCopies& operator=(const ExtraCopies&) = delete;
  // Reads the records. The files stay as they are if a record names the room, or if a record cannot
  // be read or is damaged: such a record might name the room, too.
  ~ExtraCopies();

 private:
  bool is_named() const;

  StoreFiles& files_;
};

}  // namespace sluice
