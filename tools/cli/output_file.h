// These classes write all output files of the command. Before an output is opened,
// OutputFiles::check() compares the output's path with the paths of all inputs and all other
// outputs. OutputFiles::check() also tests whether the output's folder is writable. After the
// check, the output is created under a temporary name. A rename later gives the output its final
// name. A caller makes the calls in one of these two orders:
//
//   begin() .. write() .. commit()              for files that are written as a whole: models,
//                                               JSON, pages
//   begin() .. accept() .. write() .. commit()  for files that grow during a run. accept() gives
//                                               the file its final name. A killed run therefore
//                                               leaves the part that was written. As long as
//                                               it grows, other processes refuse the file.
//
// Until accept() or commit(), an older file with the final name stays unchanged. If an OutputFile
// is destroyed before accept() or commit(), no file is left. If the path is a symbolic link, the
// link's target is replaced. A path that is not a regular file is opened directly. Examples are
// /dev/null, a pipe and /dev/stdout. Several outputs may write to such a path. The path "-" stands
// for standard output. If an output goes to standard output, text for people goes to standard
// error.
//
// Thread rule: one thread uses an OutputFiles and its files.
#pragma once

#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
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
  kPrivate,   // only the owner may read the file, because the text names tensors and paths
};

class OutputFile {
 public:
  // `option` is the name that messages give to the output, such as "--json". If `path` is empty, no
  // output is wanted, and the functions below do nothing.
  OutputFile(std::string option, const std::string& path, OutputMode mode = OutputMode::kOrdinary);

  bool is_wanted() const { return !place_.path.empty(); }
  // Returns whether the written data can be read back from path().
  bool is_regular() const { return !place_.descriptor && place_.kind != FileKind::kOther; }
  const std::string& option() const { return option_; }
  const std::string& path() const { return place_.path; }
  const FilePlace& place() const { return place_; }
  // Returns an Error if the file has lost its name since accept(), and its content with it. Another
  // process has then removed or replaced the file.
  std::optional<Error> loss() const;

  // Throws an error if it is certain that the output cannot be written. The call leaves no file
  // behind.
  // Fails with kInput, kNoSpace or kUnsupported. The message names the path, the reason and a
  // remedy.
  void check();

  // Opens the output. write() also opens the output if the output is not open yet.
  // Fails with the errors of check().
  void begin();
  // Returns the open descriptor, which this object still owns.
  // Requires: begin() or write() has opened the output.
  int descriptor() const;

  // Appends `bytes` to the output. If the call fails, the file has the same length as before the
  // call.
  // Fails with kNoSpace if the disk is full. Fails with kIo if the drive reports an error.
  // Fails with loss() if there is one.
  void write(std::string_view bytes);
  // Formats the arguments and appends the text. The text goes through a buffer. commit() writes the
  // rest of the buffer.
  template <class... Arguments>
  void print(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    fmt::format_to(std::back_inserter(buffer_), format, std::forward<Arguments>(arguments)...);
    if (buffer_.size() >= kBufferBytes) empty_buffer();
  }

  // Gives the output its final name. If the rename fails, the call prints a line on standard error,
  // and commit() tries again. The call does not throw, because other outputs may have been accepted
  // already.
  // Requires: begin() or write() has opened the output.
  void accept() noexcept;
  // Makes the output durable under its final name, and closes the file. If the rename fails after
  // all data was written, the temporary file stays, and the error message names this file.
  // Fails with the errors of write().
  void commit();
  // Closes the file, and removes the file if it does not have its final name yet.
  void discard() noexcept;

  // Returns an Error that describes a failed operation on this output. `error` is the errno of the
  // operation, and `what` names the operation.
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
  bool is_checked_ = false;  // true: a later failure means that something changed after check()
  bool is_begun_ = false;
  bool is_accepted_ = false;
  std::uint64_t size_bytes_ = 0;
  std::uint64_t written_back_bytes_ = 0;
  TemporaryFile file_;  // for an output that replaces a file
  UniqueFd opened_;     // for an output that is opened directly
  std::string buffer_;
};

// All outputs of a command, and the inputs that the outputs must not replace.
class OutputFiles {
 public:
  // `what` is the name that messages give to the input, such as "the text" or "--init". An empty
  // path is ignored. If the path is a folder, all files in the folder are inputs. The output that
  // the option `successor` names may replace this input, because the command reads the input first.
  void add_input(std::string what, const std::string& path, std::string_view successor = {});
  OutputFile& add(std::string option, const std::string& path,
                  OutputMode mode = OutputMode::kOrdinary);
  // Adds an output that another process writes. check() compares the output's path with the other
  // paths, but this process does not write the output.
  void reserve(std::string option, const std::string& path);

  // Compares the paths of all files, and then checks each output. Prints a line for each temporary
  // file that a killed process left.
  // Fails with kInput if two of the paths lead to the same file. Also fails with the errors of
  // OutputFile::check().
  void check();
  // Compares the paths of all files again, because inputs may have been added after check().
  // Fails with kInput if two of the paths lead to the same file.
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

// Writes `text` as the whole content of `output`, and commits the output.
void write_whole(OutputFile& output, std::string_view text);

// This class lets a command write several outputs, even if one output cannot be written. A disk
// that is too full for one output may still have space for the next output.
class FirstFailure {
 public:
  // Returns whether `write` has succeeded.
  template <class Write>
  bool attempt(const Write& write) {
    try {
      write();
      return true;
    } catch (const std::exception& error) {
      note(error);
      return false;
    }
  }
  // Throws the first failure, if there was one. attempt() has already printed all other failures.
  void rethrow() const;

 private:
  void note(const std::exception& error);

  std::exception_ptr first_;
};

}  // namespace sluice
