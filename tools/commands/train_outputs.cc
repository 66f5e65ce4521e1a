#include "tools/commands/train_outputs.h"

#include <unistd.h>

#include <chrono>
#include <filesystem>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/file_flush.h"
#include "engine/checkpoint/checkpoint_folder.h"
#include "tools/commands/config_inputs.h"
#include "tools/gpt/train/model_file.h"
#include "tools/gpt/train/state_origin.h"
#include "tools/report/event_file.h"

namespace sluice {
namespace {

std::string trace_file_of(const TrainConfig& config, std::uint32_t rank) {
  if (config.trace_file.empty() || rank == 0) return config.trace_file;
  return fmt::format("{}.rank{}", config.trace_file, rank);
}

// The folder is made, as for checkpoints.
std::string event_file_of(const TrainOptions& options, OutputFiles& files,
                          TrainOutputs::MadeFolders& made) {
  const std::string& folder = options.watch.tensorboard_folder;
  if (folder.empty()) return {};
  files.reserve("--tensorboard",
                folder);  // before it is there, so that no other output has its place
  made.make(folder);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return (std::filesystem::path(folder) /
          event_file_name(std::chrono::duration<double>(now).count()))
      .string();
}

// Checkpoints of both kinds have folders in their folder.
void add_resumed_folders(OutputFiles& files, const std::string& folder) {
  if (!store_in(folder).empty()) return;
  files.add_input("--resume-from", folder);
  files.add_input("--resume-from", config_beside(folder));
  std::error_code error;  // a folder that cannot be read is refused where it is used
  for (std::filesystem::recursive_directory_iterator entry(folder, error), end;
       !folder.empty() && !error && entry != end; entry.increment(error)) {
    std::error_code ignored;  // a link to nothing
    if (entry->is_directory(ignored)) files.add_input("--resume-from", entry->path().string());
  }
}

}  // namespace

void TrainOutputs::MadeFolders::make(const std::string& folder) {
  std::error_code error;
  std::filesystem::path path;
  for (const std::filesystem::path& part : std::filesystem::path(folder)) {
    path /= part;
    if (std::filesystem::create_directory(path, error)) paths.push_back(path.string());
    std::error_code ignored;
    if (error && !std::filesystem::exists(path, ignored))
      throw Error(
          file_error_code(error.value(), ErrorCode::kInput),
          fmt::format("cannot write --tensorboard \"{}\": create its folder \"{}\": {}; {}", folder,
                      path.string(), errno_text(error.value()), file_remedy(error.value())));
  }
}

TrainOutputs::MadeFolders::~MadeFolders() {
  for (auto path = paths.rbegin(); path != paths.rend(); ++path) (void)::rmdir(path->c_str());
}

TrainOutputs::TrainOutputs(const TrainOptions& options, const TrainConfig& config,
                           const TrainRanks& ranks)
    : save(add("--save", options.save_file, ranks)),
      json(add("--json", options.json_file, ranks)),
      csv(add("--csv", options.csv_file, ranks)),
      json_lines(add("--json-lines", options.json_lines_file, ranks)),
      trace(files.add("--trace", trace_file_of(config, ranks.rank()), OutputMode::kPrivate)),
      events(add("--tensorboard", event_file_of(options, files, made), ranks)) {
  add_config_inputs(files, options.config_file, config);
  files.add_input("--init", options.init_file, "--save");  // training goes on
  files.add_input("--init", config_beside(options.init_file));
  add_resumed_folders(files, options.checkpoints.resume_from);
  if (!options.checkpoints.root.empty()) {
    for (const CheckpointName& name : list_checkpoints(options.checkpoints.root))
      files.add_input("a checkpoint", options.checkpoints.root + "/" + name.text());
  }
  // The folder may not be there yet.
  files.reserve("--checkpoint", options.checkpoints.root);
  for (std::uint32_t rank = 0; rank < ranks.count(); ++rank) {
    if (rank != ranks.rank())
      files.reserve(fmt::format("the trace of rank {}", rank), trace_file_of(config, rank));
  }
  files.check();
}

OutputFile& TrainOutputs::add(const char* option, const std::string& path,
                              const TrainRanks& ranks) {
  if (ranks.rank() == 0) return files.add(option, path);
  files.reserve(option, path);
  return files.add(option, "");
}

}  // namespace sluice
