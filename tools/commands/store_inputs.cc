#include "tools/commands/store_inputs.h"

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/store/store_files.h"

namespace sluice {

void add_store_inputs(OutputFiles& files, std::span<const std::string> paths,
                      const std::string& name) {
  if (name.empty()) return;
  const std::string role = fmt::format("the store \"{}\"", name);
  for (const std::string& path : paths) {
    files.add_input(role, path + "/" + name + ".lock");
    try {
      for (const StorePath::File& file : look_at_path(path, name).files)
        files.add_input(role, path + "/" + file.name);
    } catch (const Error&) {
      // A path that cannot be read is refused where the store is opened.
    }
  }
}

}  // namespace sluice
