#include "tools/commands/state_command.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/config.h>
#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/store/durable_identity.h"
#include "engine/store/store_survey.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/option_checks.h"
#include "tools/cli/option_files.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/state_transfer.h"

namespace sluice {
namespace {

using nlohmann::ordered_json;

// The store that the config names. Fails with: kInput where it names none, or there is none.
StoreSurvey store_of(const Config::Storage& storage, const StateOptions& options) {
  require_store_name(storage, options);
  StoreSurvey store = survey_store(storage.state.name, storage.paths);
  if (store.presence == StorePresence::kNone)
    throw Error(ErrorCode::kInput, fmt::format("there is no store \"{}\" in {}", store.name,
                                               fmt::join(storage.paths, ", ")));
  return store;
}

const char* name_of(StorePresence presence) {
  return presence == StorePresence::kMade ? "made" : "unfinished";
}

ordered_json json_of(const StoreSurvey& store) {
  ordered_json ranks = ordered_json::array();
  for (const SurveyedRank& rank : store.ranks) {
    ordered_json entry{{"rank", rank.rank}};
    if (rank.problem.empty()) {
      const auto settings = ordered_json::parse(short_settings(rank.newest.settings), nullptr,
                                                /*allow_exceptions=*/false);
      entry.update({{"step", rank.newest.step},
                    {"generation", rank.newest.generation},
                    {"ranks", rank.newest.rank_count},
                    {"data_files", rank.newest.file_count},
                    {"planes", rank.newest.planes.size()},
                    {"loss_scale", rank.newest.scale.scale},
                    {"application_bytes", rank.newest.application.size()},
                    {"settings", settings.is_object() ? settings : ordered_json()}});
      if (!rank.data_problem.empty()) entry["problem"] = rank.data_problem;
    } else {
      entry["problem"] = rank.problem;
    }
    ranks.push_back(std::move(entry));
  }
  ordered_json document{{"name", store.name},
                        {"id", text_of(store.id)},
                        {"stage", name_of(store.presence)},
                        {"bytes", store.file_bytes},
                        {"paths", store.directories},
                        {"in_use_by", store.holder},
                        {"lost_marks", store.lost_marks},
                        {"ranks", std::move(ranks)},
                        {"absent_ranks", absent_ranks(store)}};
  if (store.step) document["step"] = *store.step;
  return document;
}

std::string line_of(const StoreSurvey& store) {
  std::string line = fmt::format("{}  {}", store.name, format_bytes(store.file_bytes));
  if (store.step) line += fmt::format("  step {}", *store.step);
  if (store.presence == StorePresence::kAbandoned)
    line += "  never finished; the next start removes it";
  const std::size_t absent = absent_ranks(store).size();
  const std::size_t ranks = store.ranks.size() + absent;
  const std::string here = absent == 0 ? "" : fmt::format("{} of ", store.ranks.size());
  if (ranks != 0) line += fmt::format("  {}{} rank{}", here, ranks, ranks == 1 ? "" : "s");
  if (std::ranges::any_of(store.ranks, [](const SurveyedRank& rank) {
        return !rank.problem.empty() || !rank.data_problem.empty();
      }))
    line += "  cannot be opened (`sluice state inspect` says why)";
  if (!store.holder.empty()) line += fmt::format("  in use by {}", store.holder);
  return line;
}

int list(const StateOptions& options) {
  const ConfigDocument config = read_state_config(options);
  const Config::Storage storage = engine_config(config).storage;
  StateJson json(options, config);
  ordered_json all = ordered_json::array();
  for (const std::string& name : store_names(storage.paths)) {
    try {
      const StoreSurvey store = survey_store(name, storage.paths);
      if (store.presence == StorePresence::kNone) continue;
      say("{}\n", line_of(store));
      all.push_back(json_of(store));
    } catch (const Error& error) {  // the others are still listed
      say("{}  cannot be opened: {}\n", name, error.what());
      all.push_back({{"name", name}, {"paths", storage.paths}, {"problem", error.what()}});
    }
  }
  if (all.empty()) say("no durable store in {}\n", fmt::join(storage.paths, ", "));
  json.write(all);
  return kExitOk;
}

// Each host of a store has files of its own ranks.
void say_absent(const StoreSurvey& store) {
  const std::vector<std::uint32_t> absent = absent_ranks(store);
  if (!absent.empty())
    say("no files of rank{} {} here: look on the other hosts, too\n", absent.size() == 1 ? "" : "s",
        fmt::join(absent, ", "));
}

// Says why the store as a whole has no state. Empty if its ranks have commits.
std::string obstacle_of(const StoreSurvey& store) {
  if (store.presence == StorePresence::kAbandoned)
    return fmt::format(
        "the store \"{}\" ({}) was never finished, or its removal was cut short; the next start "
        "removes it",
        store.name, text_of(store.id));
  if (store.ranks.empty())
    return fmt::format(
        "the store \"{}\" ({}) has no commit records in {}, which say what its data "
        "files hold; bring the record files back, or go on from a checkpoint",
        store.name, text_of(store.id), fmt::join(store.directories, ", "));
  return {};
}

void say_lost_marks(const StoreSurvey& store) {
  for (const std::string& directory : store.lost_marks)
    say("{}/{}.lock is missing or damaged; all files of the store are there, and the next start "
        "writes it again\n",
        directory, store.name);
}

int inspect(const StateOptions& options) {
  const ConfigDocument config = read_state_config(options);
  const Config::Storage storage = engine_config(config).storage;
  StateJson json(options, config);
  const StoreSurvey store = store_of(storage, options);
  say("{}\nid {}\n", line_of(store), text_of(store.id));
  for (const SurveyedRank& rank : store.ranks) {
    if (!rank.problem.empty()) {
      say("rank {}: {}\n", rank.rank, rank.problem);
      continue;
    }
    say("rank {} of {}: commit {} of step {}{}; {} planes in {} data files; {} of the "
        "application\n",
        rank.rank, rank.newest.rank_count, rank.newest.generation, rank.newest.step,
        rank.offer.older ? fmt::format(", step {} before it", *rank.offer.older) : "",
        rank.newest.planes.size(), rank.newest.file_count,
        format_bytes(rank.newest.application.size()));
    if (rank.rank == 0) say("  {}\n", short_settings(rank.newest.settings));
    if (!rank.data_problem.empty()) say("  {}\n", rank.data_problem);
  }
  say_absent(store);
  say_lost_marks(store);
  if (const std::string words = obstacle_of(store); !words.empty()) say("{}\n", words);
  if (const std::string words = find_disagreement(store); !words.empty()) say("{}\n", words);
  json.write(json_of(store));
  return kExitOk;
}

int verify(const StateOptions& options) {
  const ConfigDocument config = read_state_config(options);
  const Config::Storage storage = engine_config(config).storage;
  StateJson json(options, config);
  const StoreSurvey store = store_of(storage, options);
  if (!store.holder.empty())
    throw Error(ErrorCode::kInput, fmt::format("the store \"{}\" is in use by {}; what it names "
                                               "changes while it is read",
                                               store.name, store.holder));
  ordered_json document = json_of(store);
  if (const std::string words = obstacle_of(store); !words.empty()) {
    document["problem"] = words;
    json.write(document);
    throw Error(ErrorCode::kDamaged, words);
  }
  std::size_t damaged = 0;
  std::string unread;
  for (std::size_t i = 0; i < store.ranks.size(); ++i) {
    const SurveyedRank& rank = store.ranks[i];
    std::vector<std::string> lines;
    if (rank.problem.empty()) {
      const CommitRecord& record = rank.of_step(store.step);
      {
        const Progress progress(fmt::format("reading the planes of rank {}", rank.rank));
        lines = find_damaged_planes(store, rank);
      }
      say("rank {}: step {}, {} planes, {} damaged\n", rank.rank, record.step, record.planes.size(),
          lines.size());
      if (record.step != rank.newest.step)
        say("  its commit of step {} does not count: another rank has none of that step\n",
            rank.newest.step);
      document["ranks"][i]["verified_step"] = record.step;
    } else if (rank.is_damaged) {
      lines = {rank.problem};
    } else {
      unread = rank.problem;
      document["ranks"][i]["unread"] = rank.problem;
    }
    for (const std::string& line : lines) say("  {}\n", line);
    document["ranks"][i]["damaged"] = lines;
    damaged += lines.size();
  }
  say_absent(store);
  say_lost_marks(store);
  if (const std::string words = find_disagreement(store); !words.empty()) {
    say("{}\n", words);
    document["problem"] = words;
    ++damaged;
  }
  json.write(document);
  if (damaged != 0)
    throw Error(ErrorCode::kDamaged,
                fmt::format("the store \"{}\" is damaged in {} place{}; go on from a checkpoint",
                            store.name, damaged, damaged == 1 ? "" : "s"));
  if (!unread.empty())
    throw Error(ErrorCode::kInput, fmt::format("the store \"{}\" cannot be read, so it may be "
                                               "whole or damaged: {}",
                                               store.name, unread));
  return kExitOk;
}

int remove(const StateOptions& options) {
  const ConfigDocument config = read_state_config(options);
  const Config::Storage storage = engine_config(config).storage;
  require_store_name(storage, options);
  StateJson json(options, config);
  const RemovedStore removed = remove_store(storage.state.name, storage.paths);
  say("removed the store \"{}\" ({}): {}\n", storage.state.name, text_of(removed.id),
      format_bytes(removed.file_bytes));
  json.write({{"name", storage.state.name},
              {"id", text_of(removed.id)},
              {"bytes", removed.file_bytes},
              {"paths", storage.paths}});
  return kExitOk;
}

CLI::App* add_subcommand(CLI::App* state, const char* name, const char* purpose,
                         StateOptions& options) {
  CLI::App* command = state->add_subcommand(name, purpose);
  add_input(command, "CONFIG", options.config_file,
            "Config file, which names the paths and the store")
      ->required();
  command
      ->add_option("--set", options.assignments,
                   "Override any key: --set storage.state.name=run-7 (may be repeated)")
      ->allow_extra_args(false)
      ->type_name("KEY=VALUE");
  return command;
}

}  // namespace

void add_state(CLI::App& app, StateOptions& options) {
  CLI::App* state =
      app.add_subcommand("state", "Look at durable stores, check, move and remove them");
  state->require_subcommand(1);
  const char* const json = "Write the same as JSON";
  add_output(
      add_subcommand(state, "list", "List the stores on the config's storage paths", options),
      "--json", options.json_file, json);
  add_output(add_subcommand(state, "inspect", "Show what a store's last commits say", options),
             "--json", options.json_file, json);
  add_output(add_subcommand(
                 state, "verify",
                 "Read the state from which a run would go on, and compare it with its checksums",
                 options),
             "--json", options.json_file, json);
  add_output(add_subcommand(state, "remove", "Remove a store's files for good", options), "--json",
             options.json_file, json);
  CLI::App* to = add_subcommand(state, "export",
                                "Write a store's last commit as a portable checkpoint", options);
  to->add_option("DIR", options.folder, "Folder of checkpoints, as `train --checkpoint` takes it")
      ->required()
      ->type_name("");
  to->add_option("--shard-size", options.shard_size, "Largest size of a file, like 5GB")
      ->check(is_size())
      ->capture_default_str();
  to->add_flag("--sha256", options.has_sha256, "The manifest has SHA-256 digests, too");
  add_output(to, "--json", options.json_file, json);
  CLI::App* from =
      add_subcommand(state, "import", "Make a new store from a portable checkpoint", options);
  from->add_option("DIR", options.folder,
                   "A checkpoint, the folder of checkpoints it is in, a model's weights, or "
                   "store:NAME, another store")
      ->required()
      ->type_name("");
  from->add_option("--ranks", options.ranks, "Ranks that will train with the store")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  from->add_flag("--convert", options.converts,
                 "The checkpoint may have another precision, or other frozen units");
  add_output(from, "--json", options.json_file, json);
}

int run_state(const CLI::App& state, const StateOptions& options) {
  if (state.got_subcommand("inspect")) return inspect(options);
  if (state.got_subcommand("verify")) return verify(options);
  if (state.got_subcommand("remove")) return remove(options);
  if (state.got_subcommand("export")) return export_state(options);
  if (state.got_subcommand("import")) return import_state(options);
  return list(options);
}

}  // namespace sluice
