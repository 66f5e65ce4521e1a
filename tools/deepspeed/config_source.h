// Reads a config file for every command. A config is a file of Sluice or of DeepSpeed. A DeepSpeed
// file is recognised by its keys and imported.
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

  // The place of the key's value in the user's file.
  std::string origin_of(const std::string& key) const;
};

// `argument` is a path, or DeepSpeed's base64. `assignments` are KEY=VALUE. The assignments are
// applied last. The assignments' values also replace an "auto". `values.ranks` is the launcher's
// number of ranks if there are several.
// Fails with kInput or kConfig. For a DeepSpeed file, one message lists everything that is refused.
ConfigSource read_config_source(const std::string& argument, DeepspeedValues values,
                                const std::vector<std::string>& assignments);

// The name of an argument in messages, because base64 text would be too long.
std::string name_of_source(const std::string& argument);

}  // namespace sluice
