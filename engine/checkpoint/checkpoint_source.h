// A source that reads the state from the folder of a checkpoint (sluice/checkpoint.h).
// Thread rule: any number of threads may call read(). Only one thread may call the other functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <sluice/checkpoint.h>
#include "engine/checkpoint/checkpoint_manifest.h"
#include "engine/checkpoint/piece_cache.h"
#include "engine/checkpoint/safetensors_file.h"

namespace sluice {

// Reads the manifest of the checkpoint in `folder`, and no other file.
// Fails with the errors of parse_manifest(), and with kInput if there is no manifest.
CheckpointManifest read_manifest(const std::string& folder);

class CheckpointSource final : public StateSource {
 public:
  // Reads the manifest, and checks every file's length and header.
  // Fails with kInput if a file is missing or cannot be used, and with kDamaged if a length or a
  // checksum differs. The message names the file, the field, the expected value and the found
  // value.
  explicit CheckpointSource(const std::string& folder,
                            CheckpointPrecision precision = CheckpointPrecision::kAsSaved);
  ~CheckpointSource() override;

  const std::string& folder() const { return folder_; }
  const CheckpointManifest& manifest() const { return manifest_; }

  StatePosition position() const override { return manifest_.position; }
  // Fails with kInput if the checkpoint's model, precision or optimizer differs from `wanted`.
  void prepare(const StateDescription& wanted) override;
  // Fails with:
  // - kDamaged: bytes have changed since they were written. The message names the file and the
  //   range.
  // - kIo: the drive reports an error.
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override;
  bool allows_threads() const override { return true; }
  // Reads and checks the whole checkpoint.
  // Fails with the errors of read().
  void verify();

 private:
  // The bytes of a piece that has been read completely and has the correct checksum.
  using Checked = std::shared_ptr<const std::span<const std::byte>>;

  void open_files();
  void check_places() const;
  void check_words(const std::string& tensor) const;
  const CheckpointManifest::Stored* find(const std::string& tensor, CheckpointPart part) const;
  bool was_frozen(const std::string& tensor) const;
  // Calls `take(bytes, first, count)` for each piece of the range, with the elements in their
  // stored form.
  template <class Take>
  void read_part(const CheckpointManifest::Stored& stored, std::uint64_t first_element,
                 std::uint64_t count, const Take& take);
  Checked load(const CheckpointManifest::Stored& stored, std::size_t piece);
  // Reads words of an opaque unit.
  void read_words(const std::string& tensor, std::uint64_t first_element, std::span<float> values);
  void read_masters(const std::string& tensor, std::uint64_t first_element,
                    std::span<float> values);
  std::string path_of(const std::string& name) const { return folder_ + "/" + name; }

  // Constant after construction.
  std::string folder_;
  CheckpointPrecision precision_;
  CheckpointManifest manifest_;
  std::map<std::pair<std::string, CheckpointPart>, const CheckpointManifest::Stored*> places_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;

  PieceCache pieces_;
};

}  // namespace sluice
