// The one way in which the command writes files. An output is compared with every input and every
// other output, and its folder is tried, before anything is opened. It then appears under a
// temporary name and gets its own by rename:
//
//   begin() .. write() .. commit()              once, whole: models, JSON, pages
//   begin() .. accept() .. write() .. commit()  its own name as soon as the run is accepted: what
//                                               grows, so that a killed run leaves what it had
//
// Until accept() or commit() an older file of that name stays as it was; an output that goes
// without either leaves nothing. A symbolic link is followed and its target replaced. A path that
// is not a regular file (/dev/null, a pipe, /dev/stdout) is opened as it is, and several outputs
// may go there.
//
// Thread rule: one thread per set.
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
  kOrdinary,  // as the user's umask and the file that is replaced have it
  kPrivate,   // the owner's alone: what names tensors and paths
};

class OutputFile {
 public:
  // `option` stands in messages: "--json". `path` empty: not asked for; the functions below do
  // nothing then.
  OutputFile(std::string option, const std::string& path, OutputMode mode = OutputMode::kOrdinary);

  bool is_wanted() const { return !place_.path.empty(); }
  // The written data can be read back from path().
  bool is_regular() const { return !place_.descriptor && place_.kind != FileKind::kOther; }
  const std::string& option() const { return option_; }
  const std::string& path() const { return place_.path; }
  const FilePlace& place() const { return place_; }

  // Refuses an output that cannot be written, as far as that can be known beforehand. Leaves
  // nothing behind.
  // Fails with: kInput, with path, reason and remedy; kNoSpace, kUnsupported.
  void check();

  // Opens it; write() does so, too. Fails with: as check().
  void begin();
  // Requires: begun. Stays this object's.
  int descriptor() const;

  // Fails with: kNoSpace, kIo. A piece that could not be written whole is cut off again.
  void write(std::string_view bytes);
  // The same, through a buffer that commit() empties.
  template <class... Arguments>
  void print(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    fmt::format_to(std::back_inserter(buffer_), format, std::forward<Arguments>(arguments)...);
    if (buffer_.size() >= kBufferBytes) empty_buffer();
  }

  // Gives it its own name. If that fails, a line on standard error says so, and commit() tries
  // again: other outputs have been accepted by then, so nothing can be refused any more.
  // Requires: begun.
  void accept() noexcept;
  // Makes it durable under its own name, and ends it. Where all is written but the name cannot be
  // had, the temporary file stays, and the message names it.
  // Fails with: kNoSpace, kIo.
  void commit();
  // Ends it. Without its own name it is gone.
  void discard() noexcept;

  // The error for an errno of this output; `what` is what was attempted.
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
  void write_back();
  void make_durable();

  std::string option_;
  FilePlace place_;
  OutputMode mode_;
  bool is_checked_ = false;  // what fails now was possible before
  bool is_begun_ = false;
  bool is_accepted_ = false;
  std::uint64_t size_bytes_ = 0;
  std::uint64_t written_back_bytes_ = 0;
  TemporaryFile file_;  // of what is replaced
  UniqueFd opened_;     // of what is opened as it is
  std::string buffer_;
};

// All outputs of a command, and the inputs that they must not touch.
class OutputFiles {
 public:
  // `what` stands in messages: "the text", "--init". Empty paths are none. The output of option
  // `successor` may replace it: the input has been read by then.
  void add_input(std::string what, const std::string& path, std::string_view successor = {});
  OutputFile& add(std::string option, const std::string& path,
                  OutputMode mode = OutputMode::kOrdinary);
  // Another process's output, which is compared and not written.
  void reserve(std::string option, const std::string& path);

  // Compares all, then checks each. Prints a line for each temporary file that a killed process
  // left. Fails with: kInput where two are one file; as OutputFile::check().
  void check();
  void discard() noexcept;

 private:
  void compare() const;

  struct Named {
    std::string what;
    FilePlace place;
    std::string successor;
  };

  std::vector<Named> inputs_;
  std::vector<Named> reserved_;
  std::vector<std::unique_ptr<OutputFile>> outputs_;
};

// For commands with one file, in one piece.
void write_whole(OutputFile& output, std::string_view text);

// Outputs are written each on its own: a disk that is too full for one may still hold the next.
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
  // Throws the first failure; the others have been printed by then.
  void rethrow() const;

 private:
  void note(const std::exception& error);

  std::exception_ptr first_;
};

}  // namespace sluice
