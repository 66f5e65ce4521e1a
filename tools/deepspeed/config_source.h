// The one way in which commands read a config: a file of Sluice, or one of DeepSpeed, which is
// recognised by its keys and imported.
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
  std::optional<ImportReport> report;  // of a DeepSpeed file

  // The place of a key's value in the file that the user has written.
  std::string origin_of(const std::string& key) const;
};

// `argument` is a path, or DeepSpeed's base64. `assignments` are KEY=VALUE; they come last, and
// what they give also resolves an "auto". `values.ranks` is what the launcher says, if that is
// more than one.
// Fails with: kInput, kConfig; for a DeepSpeed file with all that is refused in one message.
ConfigSource read_config_source(const std::string& argument, DeepspeedValues values,
                                const std::vector<std::string>& assignments);

// The name of an argument in messages: base64 is too long for one.
std::string name_of_source(const std::string& argument);

}  // namespace sluice
