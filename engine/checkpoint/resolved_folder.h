// The function finds what the path of a model's folder names at this moment. A link such as
// "latest" may name another folder a moment later. Files that are opened below the result are of
// one folder.
//
// Thread rule: any thread.
#pragma once

#include <filesystem>
#include <string>
#include <system_error>

namespace sluice {

// Returns `folder` itself if no part of it is a link, or if it does not exist.
inline std::string resolved_folder(const std::string& folder) {
  std::error_code unknown;
  const std::filesystem::path found = std::filesystem::canonical(folder, unknown);
  if (unknown) return folder;
  std::filesystem::path plain = std::filesystem::absolute(folder, unknown).lexically_normal();
  if (!plain.has_filename()) plain = plain.parent_path();
  return unknown || plain != found ? found.string() : folder;
}

}  // namespace sluice
