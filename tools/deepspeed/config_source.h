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

  // Returns the place in the user's file at which the value of `key` stands.
  std::string origin_of(const std::string& key) const;
};

// `argument` is a path, or the config itself in base64, as DeepSpeed accepts it. Each of
// `assignments` has the form KEY=VALUE. The assignments are applied after the file, and also
// replace values that are "auto". If the launcher started several ranks, `values.ranks` is their
// number.
// Fails with kInput or kConfig. For a DeepSpeed file, one message lists all keys that are refused.
ConfigSource read_config_source(const std::string& argument, DeepspeedValues values,
                                const std::vector<std::string>& assignments);

// Returns the name of a config argument in messages. The name of a base64 text is short, because
// the text itself would be too long.
std::string name_of_source(const std::string& argument);

}  // namespace sluice
