#include "tools/commands/tokenize_command.h"

#include "tools/cli/exit_codes.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/config_inputs.h"
#include "tools/gpt/text/token_file.h"
#include "tools/gpt/text/tokenizer.h"

namespace sluice {

int run_tokenize(const TokenizeOptions& options) {
  catch_interrupts();
  Tokenizer tokenizer(options.tokenizer);
  OutputFiles files;
  files.add_input("the text", options.text_file);
  add_tokenizer_inputs(files, "--tokenizer", tokenizer.path());
  OutputFile& output = files.add("--output", options.output_file);
  files.check();
  std::uint64_t count = 0;
  {
    const Progress progress("tokenizing the text");
    count = write_token_file(options.text_file, tokenizer, output);
  }
  say("{} tokens of \"{}\", {} in the vocabulary, written to \"{}\"\n", count, options.text_file,
      tokenizer.token_count(), options.output_file);
  return kExitOk;
}

}  // namespace sluice
