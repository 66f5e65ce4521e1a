// Reads the config file of a command. The file is either a config of Sluice or a config of
// DeepSpeed. The reader recognises a DeepSpeed file by its keys, and imports the file.
//
// Thread rule: one thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <sluice/config_document.h>
#include "tools/deepspeed/deepspeed_import.h"

namespace sluice {

struct ConfigSource {
  ConfigDocument document;
  std::optional<ImportReport> report;  // for a DeepSpeed file

  // Returns the place of `key`'s value in the user's file.
  std::string origin_of(const std::string& key) const;
};

// `argument` is a path, or a config in base64. DeepSpeed also accepts a path or base64. Each of
// `assignments` has the form KEY=VALUE. The assignments override the file's values, and also
// replace values that are "auto". If two assignments have the same key, the last one counts. If a
// launcher started several ranks, the number of these ranks replaces `values.ranks`.
// Fails with kInput if the file cannot be read. Fails with kConfig if the config or an assignment
// is wrong, or if `values` has a value from an option and the file is a config of Sluice. For a
// DeepSpeed file, one message lists all keys that are refused.
ConfigSource read_config_source(const std::string& argument, DeepspeedValues values,
                                const std::vector<std::string>& assignments);

// Fails with kConfig if `values` has a value from an option that only a DeepSpeed file has a use
// for. `name` names the config of Sluice that was given instead.
void refuse_deepspeed_values(const DeepspeedValues& values, const std::string& name);

// Returns the name that messages use for the config in `argument`. The name of a base64 text is
// short, because the text itself would be too long.
std::string name_of_source(const std::string& argument);

}  // namespace sluice
