#include "tools/commands/store_inputs.h"

#include <filesystem>
#include <system_error>

#include <fmt/format.h>

namespace sluice {

void add_store_inputs(OutputFiles& files, std::span<const std::string> paths,
                      const std::string& name) {
  if (name.empty()) return;
  for (const std::string& path : paths) {
    std::error_code error;  // a path that cannot be read is refused where the store is opened
    for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end;
         entry.increment(error)) {
      if (entry->path().filename().string().starts_with(name + "."))
        files.add_input(fmt::format("the store \"{}\"", name), entry->path().string());
    }
  }
}

}  // namespace sluice
