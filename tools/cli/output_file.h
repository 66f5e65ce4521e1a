// This class writes all files that the command writes. Before anything is opened, an output is
// compared with every input and every other output. The output's folder is tried, too. The output
// is then created under a temporary name, and a rename gives it the final name:
//
//   begin() .. write() .. commit()              once, whole: models, JSON, pages
//   begin() .. accept() .. write() .. commit()  growing files: the final name comes as soon as the
//                                               run is accepted, so that a killed run leaves the
//                                               part that was written
//
// Until accept() or commit(), an older file of that name stays as it was. An output that is
// destroyed before either call leaves nothing. A symbolic link is followed, and its target is
// replaced. A path that is not a regular file (/dev/null, a pipe, /dev/stdout) is opened directly,
// and several outputs may write to it. The path "-" is standard output. Text for people then goes
// to standard error.
//
// Thread rule: one thread uses an OutputFiles and its files.
#pragma once

#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/unique_fd.h"
#include "tools/cli/file_place.h"
#include "tools/cli/temporary_file.h"

namespace sluice {

enum class OutputMode {
  kOrdinary,  // permissions from the user's umask and the replaced file
  kPrivate,   // only for the owner, because the text names tensors and paths
};

class OutputFile {
 public:
  // `option` is the name that messages give to the output, such as "--json". An empty `path` means
  // that no output is wanted. The functions below then do nothing.
  OutputFile(std::string option, const std::string& path, OutputMode mode = OutputMode::kOrdinary);

  bool is_wanted() const { return !place_.path.empty(); }
  // Whether the written data can be read back from path().
  bool is_regular() const { return !place_.descriptor && place_.kind != FileKind::kOther; }
  const std::string& option() const { return option_; }
  const std::string& path() const { return place_.path; }
  const FilePlace& place() const { return place_; }

  // The call refuses an output that cannot be written, if this is known before the first write.
  // Leaves nothing behind.
  // Fails with kInput, with path, reason and remedy, and with kNoSpace or kUnsupported.
  void check();

  // Opens the output. The call write() does this, too. Fails with the errors of check().
  void begin();
  // The open descriptor. This object still owns the descriptor. Requires: the output is begun.
  int descriptor() const;

  // Fails with kNoSpace or kIo. After a failure the file is truncated to its length before the
  // call.
  void write(std::string_view bytes);
  // Does the same as write(std::string_view), through a buffer that commit() empties.
  template <class... Arguments>
  void print(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    fmt::format_to(std::back_inserter(buffer_), format, std::forward<Arguments>(arguments)...);
    if (buffer_.size() >= kBufferBytes) empty_buffer();
  }

  // Gives the output its final name. If the rename fails, a line on standard error reports the
  // failure, and commit() tries again. At this time it is too late to refuse the output, because
  // other outputs have already been accepted.
  // Requires: the output is begun.
  void accept() noexcept;
  // Makes the output durable under its final name, and closes it. If all data is written but the
  // rename fails, the temporary file stays, and the message names this file.
  // Fails with kNoSpace or kIo.
  void commit();
  // Closes the output. If the output does not have its final name yet, the call removes the output.
  void discard() noexcept;

  // The error for an errno of this output. `what` names the operation that failed.
  Error failure(std::string_view what, int error) const;

 private:
  static constexpr std::size_t kBufferBytes = 64 << 10;
  static constexpr std::uint64_t kWriteBackBytes = 32 << 20;

  [[noreturn]] void refuse(const std::string& why) const;
  void check_descriptor() const;
  void check_place() const;
  void check_folder() const;
  TemporaryFile create() const;
  void empty_buffer();
  int append(std::string_view bytes);
  int write_back();
  void make_durable();

  std::string option_;
  FilePlace place_;
  OutputMode mode_;
  bool is_checked_ = false;  // a failure from now on comes from a later change
  bool is_begun_ = false;
  bool is_accepted_ = false;
  std::uint64_t size_bytes_ = 0;
  std::uint64_t written_back_bytes_ = 0;
  TemporaryFile file_;  // for an output that replaces a file
  UniqueFd opened_;     // for an output that is opened directly
  std::string buffer_;
};

// All outputs of a command, and the inputs that they must not touch.
class OutputFiles {
 public:
  // `what` is the name that messages give to the input, such as "the text" or "--init". Empty paths
  // are ignored. A folder stands for the files in it. The output of option `successor` may replace
  // this input, because the input has been read by then.
  void add_input(std::string what, const std::string& path, std::string_view successor = {});
  OutputFile& add(std::string option, const std::string& path,
                  OutputMode mode = OutputMode::kOrdinary);
  // The call adds the output of another process. That output is compared, but not written.
  void reserve(std::string option, const std::string& path);

  // Compares all files, then checks each output. Prints a line for each temporary file that a
  // killed process left.
  // Fails with kInput if two of the paths lead to the same file, and with the errors of
  // OutputFile::check().
  void check();
  // Compares all files again, for inputs that were added since.
  // Fails with kInput in the cases of check().
  void compare() const;

 private:
  struct Named {
    std::string what;
    FilePlace place;
    std::string successor;
  };

  std::vector<Named> inputs_;
  std::vector<Named> reserved_;
  std::vector<std::unique_ptr<OutputFile>> outputs_;
};

// Writes `text` as the whole output and commits it. The function is for commands that write a file
// in one piece.
void write_whole(OutputFile& output, std::string_view text);

// Attempts each output independently. A disk that is too full for one output may still hold the
// next output.
class FirstFailure {
 public:
  template <class Write>
  void attempt(const Write& write) {
    try {
      write();
    } catch (const std::exception& error) {
      note(error);
    }
  }
  // Throws the first failure. The other failures have been printed by then.
  void rethrow() const;

 private:
  void note(const std::exception& error);

  std::exception_ptr first_;
};

}  // namespace sluice
