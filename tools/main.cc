// The sluice command: parses the command line, runs a subcommand, turns errors into messages and
// exit codes.
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include <sluice/error.h>
#include "gpu/cuda/cuda_environment.h"
#include "tools/cli/command_table.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/help_format.h"
#include "tools/cli/option_checks.h"
#include "tools/cli/option_files.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/cli/usage.h"
#include "tools/commands/bench_options.h"
#include "tools/commands/config_options.h"
#include "tools/commands/doctor_command.h"
#include "tools/commands/generate_command.h"
#include "tools/commands/plan_options.h"
#include "tools/commands/state_command.h"
#include "tools/commands/tokenize_command.h"
#include "tools/commands/top_command.h"
#include "tools/commands/trace_options.h"
#include "tools/commands/train_command.h"
#include "tools/commands/train_options.h"
#include "tools/commands/tune_options.h"
#include "tools/commands/version_command.h"

namespace {

void add_generate(CLI::App& app, sluice::GenerateOptions& options) {
  CLI::App* generate = app.add_subcommand("generate", "Continue a prompt with a saved model");
  sluice::add_input(generate, "--model", options.model_file, "Model file (safetensors)")
      ->required();
  sluice::add_input(generate, "--tokenizer", options.tokenizer,
                    "Tokenizer (tokenizer.json, vocab.json or a folder); default: the one in the "
                    "model's folder, or bytes");
  generate->add_option("--prompt", options.prompt, "Text to continue")->required();
  generate->add_option("--tokens", options.tokens, "How many tokens to add")
      ->check(CLI::Range(std::uint64_t{0}, std::uint64_t{1'000'000'000}))
      ->capture_default_str();
  generate
      ->add_option("--temperature", options.temperature,
                   "0 = the most probable token; higher = more varied")
      ->check(sluice::between(0, 1e6))
      ->capture_default_str();
  generate
      ->add_option("--top-k", options.top_k, "Draw from the k most probable tokens; 0 = from all")
      ->capture_default_str();
  generate->add_option("--seed", options.seed, "The same seed draws the same tokens")
      ->check(CLI::Range(std::uint64_t{0}, (std::uint64_t{1} << 53) - 1))
      ->capture_default_str();
  generate
      ->add_option("--threads", options.threads, "Threads; 0 = the cores granted to the process")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

void add_tokenize(CLI::App& app, sluice::TokenizeOptions& options) {
  CLI::App* tokenize = app.add_subcommand("tokenize", "Turn a text into a file of tokens");
  sluice::add_input(tokenize, "TEXT", options.text_file, "The text")->required();
  sluice::add_input(tokenize, "--tokenizer", options.tokenizer,
                    "Tokenizer (tokenizer.json, vocab.json or a folder)")
      ->required();
  sluice::add_output(tokenize, "--output", options.output_file,
                     "The token file (llm.c's format with a header)")
      ->required();
}

void add_doctor(CLI::App& app, sluice::DoctorOptions& options) {
  CLI::App* doctor = app.add_subcommand(
      "doctor", "Check what this machine offers, and say how to mend what is missing");
  doctor->add_option("--path", options.paths, "Storage folder to check (may be repeated)")
      ->allow_extra_args(false)
      ->capture_default_str();
  sluice::add_output(doctor, "--json", options.json_file,
                     "Write the findings; - for standard output");
}

struct GeneralOptions {
  bool version = false;  // --version
  bool as_json = false;
  std::string shell = "bash";      // that completion is for
  const CLI::App* help = nullptr;  // takes the words behind it
};

void add_general(CLI::App& app, GeneralOptions& options) {
  CLI::Option* version = app.add_flag("--version", options.version, "Print the version");
  const char* const json = "As JSON, with commit, compiler, CUDA, MPI and SIMD";
  app.add_flag("--json", options.as_json, json)->needs(version);
  app.add_subcommand("version", "Print the version, and how this program was built")
      ->add_flag("--json", options.as_json, json);
  app.add_subcommand("man", "This manual as a page for man(1): sluice man > sluice.1");
  app.add_subcommand("completion", "Completion for a shell: source <(sluice completion)")
      ->add_option("SHELL", options.shell, "bash, zsh or fish")
      ->check(CLI::IsMember({"bash", "zsh", "fish"}))
      ->capture_default_str();
  options.help = app.add_subcommand("help", "The help of a command, such as: sluice help bench io")
                     ->prefix_command();
}

void add_top(CLI::App& app, sluice::TopOptions& options) {
  CLI::App* top = app.add_subcommand("top", "Show what running jobs are doing, every second");
  top->add_flag("--once", options.once, "Once, and end");
  CLI::Option* json = top->add_flag("--json", options.as_json, "Once, as JSON");
  CLI::Option* prometheus =
      top->add_flag("--prometheus", options.as_prometheus, "Once, as text for Prometheus")
          ->excludes(json);
  CLI::Option* web = top->add_flag("--web", options.on_web,
                                   "As a page for a browser on this machine, until Ctrl-C")
                         ->excludes(json)
                         ->excludes(prometheus)
                         ->excludes("--once");
  top->add_option("--port", options.port, "The page's port; 0 = any free one")
      ->check(sluice::between(0, 65535))
      ->capture_default_str()
      ->needs(web);
}

// Runs the subcommand that was parsed.
struct Commands {
  GeneralOptions general;
  sluice::TrainOptions train;
  sluice::GenerateOptions generate;
  sluice::TokenizeOptions tokenize;
  sluice::DoctorOptions doctor;
  sluice::PlanOptions plan;
  sluice::TuneOptions tune;
  sluice::BenchCommands bench;
  sluice::TraceCommands trace;
  sluice::ConfigCommands config;
  sluice::StateOptions state;
  sluice::TopOptions top;

  int run(const CLI::App& app) const {
    if (general.version && !general.as_json) {
      sluice::say("{}\n", sluice::version_line());
      return sluice::kExitOk;
    }
    if (general.version || app.got_subcommand("version"))
      return sluice::run_version(general.as_json);
    if (app.got_subcommand("man")) {
      sluice::say_text(sluice::man_page(app));
      return sluice::kExitOk;
    }
    if (app.got_subcommand("completion")) {
      sluice::say_text(general.shell == "zsh"    ? sluice::zsh_completion(app)
                       : general.shell == "fish" ? sluice::fish_completion(app)
                                                 : sluice::bash_completion(app));
      return sluice::kExitOk;
    }
    if (app.got_subcommand("help")) {
      sluice::say_text(sluice::help_text(app, general.help->remaining()));
      return sluice::kExitOk;
    }
    if (app.got_subcommand("train")) return sluice::run_train(train);
    if (app.got_subcommand("bench")) return bench.run(app.get_subcommand("bench"));
    if (app.got_subcommand("plan")) return sluice::run_plan(plan);
    if (app.got_subcommand("tune")) return sluice::run_tune(tune);
    if (app.got_subcommand("config")) return config.run(app.get_subcommand("config"));
    if (app.got_subcommand("state")) return sluice::run_state(*app.get_subcommand("state"), state);
    if (app.got_subcommand("trace")) return trace.run(app.get_subcommand("trace"));
    if (app.got_subcommand("top")) return sluice::run_top(top);
    if (app.got_subcommand("doctor")) return sluice::run_doctor(doctor);
    if (app.got_subcommand("tokenize")) return sluice::run_tokenize(tokenize);
    return sluice::run_generate(generate);
  }
};

void add_commands(CLI::App& app, Commands& commands) {
  sluice::add_train(app, commands.train);
  add_generate(app, commands.generate);
  add_tokenize(app, commands.tokenize);
  sluice::add_plan(app, commands.plan);
  sluice::add_tune(app, commands.tune);
  sluice::add_bench(app, commands.bench);
  sluice::add_trace(app, commands.trace);
  sluice::add_config(app, commands.config);
  sluice::add_state(app, commands.state);
  add_top(app, commands.top);
  add_doctor(app, commands.doctor);
  add_general(app, commands.general);
}

// The first word of every message about a failure.
std::string error_mark() {
  return sluice::coloured(STDERR_FILENO, sluice::Colour::kBad, "sluice:");
}

// The exit code after `code`. By then a line on standard error has reported lost output; a pipe
// whose reader has seen enough is not a failure.
int finished(int code) {
  sluice::flush_said();
  switch (sluice::said_failure()) {
    case 0:
    case EPIPE: return code;
    case ENOSPC:
    case EDQUOT:
    case EFBIG: return code == sluice::kExitOk ? sluice::kExitResource : code;
    default: return code == sluice::kExitOk ? sluice::kExitInternal : code;
  }
}

// Skips the exit handlers of libraries, which may wait forever: where address space is short,
// OpenBLAS waits for threads of its own that never get their memory.
[[noreturn]] void leave(int code) {
  std::fflush(nullptr);
  ::_exit(code);
}

}  // namespace

int main(int argc, char** argv) {
  sluice::keep_standard_descriptors();
  sluice::prepare_cuda_environment();
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond `ulimit -f` is an error with a message
  std::signal(SIGPIPE, SIG_IGN);  // and so is a pipe whose reader has gone
  CLI::App app(
      "Sluice trains models whose training state fits neither the GPU nor the host's memory.",
      "sluice");
  app.formatter(std::make_shared<sluice::HelpFormat>());  // the commands added below take it, too
  app.require_subcommand(0, 1);                           // `help` takes the names of others
  Commands commands;
  add_commands(app, commands);
  sluice::check_numbers(app);
  sluice::refuse_empty_texts(app);
  if (const auto word = sluice::option_without_value({argv, static_cast<std::size_t>(argc)})) {
    sluice::warn("{} {} has no value; write it behind the \"=\"\n", error_mark(), *word);
    return sluice::kExitUsage;
  }
  try {
    app.parse(argc, argv);
    if (app.get_subcommands().empty() && !commands.general.version)
      throw CLI::RequiredError::Subcommand(1);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {
      (void)app.exit(error);  // help that was asked for
      return finished(sluice::kExitOk);
    }
    sluice::warn("{} {}", error_mark(), sluice::usage_mistake(app, error));
    return sluice::kExitUsage;
  }
  commands.train.checkpoints.command =
      sluice::command_that_goes_on({argv, static_cast<std::size_t>(argc)});
  try {
    return finished(commands.run(app));
  } catch (const sluice::Error& error) {
    sluice::warn("{} {}\n", error_mark(), error.what());
    const int code = sluice::exit_code_of(error.code());
    if (code == sluice::kExitResource) leave(code);
    return code;
  } catch (const std::filesystem::filesystem_error& error) {
    sluice::warn("{} cannot reach \"{}\": {}; check the modes of the folders above it\n",
                 error_mark(), error.path1().string(), error.code().message());
    return sluice::kExitUsage;
  } catch (const std::bad_alloc&) {
    sluice::warn("{} the machine's memory is used up; train a smaller model or batch\n",
                 error_mark());
    leave(sluice::kExitResource);
  } catch (const std::exception& error) {
    sluice::warn("{} internal error: {}\n", error_mark(), error.what());
    leave(sluice::kExitInternal);
  }
}
