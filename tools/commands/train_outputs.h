// The files that a training run writes, and the files that the run must not replace. Each rank
// writes its own trace. Rank 0 writes all other files for all ranks.
//
// Thread rule: one thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/cli/output_file.h"
#include "tools/commands/train_command.h"
#include "tools/gpt/train/train_config.h"
#include "tools/gpt/train/train_ranks.h"

namespace sluice {

struct TrainOutputs {
  // The constructor compares the paths of all files, and checks each output. Must be called before
  // the text is converted into tokens, while `config.data_file` still names the text. The
  // conversion of the text can take minutes, and writes a file.
  // Fails with the errors of OutputFiles::check().
  TrainOutputs(const TrainOptions& options, const TrainConfig& config, const TrainRanks& ranks);

  // Folders that were made for an output. The destructor removes those that are still empty: those
  // of a run that was refused.
  struct MadeFolders {
    MadeFolders() = default;
    MadeFolders(const MadeFolders&) = delete;
    MadeFolders& operator=(const MadeFolders&) = delete;
    ~MadeFolders();
    void make(const std::string& folder);

    std::vector<std::string> paths;  // outer folders first
  };

  MadeFolders made;  // first: it ends after the files in the folders
  OutputFiles files;
  OutputFile& save;
  OutputFile& json;
  OutputFile& csv;
  OutputFile& json_lines;
  OutputFile& trace;
  OutputFile& events;

 private:
  OutputFile& add(const char* option, const std::string& path, const TrainRanks& ranks);
};

}  // namespace sluice
