// Reads a whole file. The result depends only on the path and the file system.
#pragma once

#include <filesystem>
#include <fstream>
#include <ios>
#include <string>

namespace sluice::test {

// Returns the bytes of the file at `path`, or an empty text if the file cannot be read. The
// function needs the size of the file first. Files of /proc have no size, so the function cannot
// read such files. An iterator over the stream's characters would take a hundred times as long in
// builds without optimization.
inline std::string file_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return {};
  std::string text(static_cast<std::size_t>(file.tellg()), '\0');
  file.seekg(0);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  return text;
}

}  // namespace sluice::test
