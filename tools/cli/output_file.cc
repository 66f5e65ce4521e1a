#include "tools/cli/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "base/file_flush.h"
#include "tools/cli/print.h"

namespace sluice {
namespace {

constexpr mode_t kOrdinaryMode = 0666;  // less the umask
constexpr mode_t kPrivateMode = 0600;

// sync_file_range() is not known everywhere.
bool is_refusal_to_write_back(int error) {
  return error == ENOSYS || error == EINVAL || error == ESPIPE;
}

}  // namespace

OutputFile::OutputFile(std::string option, const std::string& path, OutputMode mode)
    : option_(std::move(option)), mode_(mode) {
  if (path == "-") leave_standard_output_to_data();
  if (!path.empty()) place_ = place_of(path == "-" ? "/dev/stdout" : path);
}

void OutputFile::refuse(const std::string& why) const {
  throw Error(ErrorCode::kInput,
              fmt::format("cannot write {} \"{}\": {}", option_, place_.path, why));
}

Error OutputFile::failure(std::string_view what, int error) const {
  const char* const old =
      is_accepted_ || !is_regular() || place_.kind == FileKind::kMissing ? "" : "; it is as it was";
  const ErrorCode otherwise = is_checked_ ? ErrorCode::kIo : ErrorCode::kInput;
  return {file_error_code(error, otherwise),
          fmt::format("cannot write {} \"{}\": {}: {}{}; {}", option_, place_.path, what,
                      errno_text(error), old, file_remedy(error))};
}

void OutputFile::check() {
  if (!is_wanted()) return;
  if (place_.folder.empty() && place_.error == ENOENT)
    refuse("its folder does not exist; create it, or name another place");
  if (place_.error != 0) throw failure("follow the path", place_.error);
  if (place_.kind == FileKind::kFolder) refuse("it is a folder; name a file in it");
  if (place_.kind == FileKind::kBlockDevice) refuse("it is a drive; name a file");
  if (place_.descriptor) {
    check_descriptor();
  } else {
    check_place();
  }
  is_checked_ = true;
}

void OutputFile::check_descriptor() const {
  const int flags = ::fcntl(*place_.descriptor, F_GETFL);
  if (flags >= 0 && (flags & O_ACCMODE) == O_RDONLY)
    refuse(fmt::format("descriptor {} is open for reading alone; open it for writing",
                       *place_.descriptor));
}

void OutputFile::check_place() const {
  if (place_.kind != FileKind::kMissing && ::access(place_.target.c_str(), W_OK) != 0)
    refuse(
        fmt::format("{}; change the mode of the file, or name another place", errno_text(errno)));
  if (place_.is_mount)
    refuse("it is a file that is mounted by itself, which cannot be replaced; mount its folder");
  if (place_.kind == FileKind::kRegular && is_being_written(place_.target))
    refuse("another process still writes it; name another file, or end that process first");
  if (place_.kind != FileKind::kOther) check_folder();
}

void OutputFile::check_folder() const {
  struct stat folder {};
  const uid_t user = ::geteuid();
  // Where the sticky bit is set, as in /tmp, only these may give its name to another file.
  if (place_.kind == FileKind::kRegular && user != 0 && user != place_.owner &&
      ::stat(place_.folder.c_str(), &folder) == 0 && (folder.st_mode & S_ISVTX) != 0 &&
      user != folder.st_uid)
    refuse(
        "it is another user's, and its folder is sticky, so no other user can replace it; name "
        "another place");
  try {
    (void)create();
  } catch (const Error& error) {
    throw Error(error.code(),
                fmt::format("{} (folder \"{}\"; a file is written beside its name first, so that a "
                            "failure keeps the old one)",
                            error.what(), place_.folder));
  }
}

TemporaryFile OutputFile::create() const {
  try {
    TemporaryFile file(place_.target, mode_ == OutputMode::kPrivate ? kPrivateMode : kOrdinaryMode);
    // As far as the system allows, the new file gets the owner of the file that it replaces.
    if (place_.kind == FileKind::kRegular && mode_ == OutputMode::kOrdinary) {
      if (::fchown(file.descriptor(), place_.owner, place_.group) == 0)
        (void)::fchmod(file.descriptor(), place_.mode & 0777);
    }
    return file;
  } catch (const std::system_error& error) {
    throw failure("create a temporary file", error.code().value());
  }
}

void OutputFile::begin() {
  if (!is_wanted() || is_begun_) return;
  if (place_.descriptor) {
    opened_ = UniqueFd(::fcntl(*place_.descriptor, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
    if (!opened_) throw failure("duplicate its descriptor", errno);
  } else if (place_.kind == FileKind::kOther) {
    opened_ = UniqueFd(::open(place_.target.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY));
    if (!opened_) throw failure("open", errno);
  } else {
    file_ = create();
  }
  is_begun_ = true;
}

int OutputFile::descriptor() const {
  return opened_ ? opened_.get() : file_.descriptor();
}

// Two runs that begin at one moment may both have found the name free.
std::optional<Error> OutputFile::loss() const {
  struct stat file {};
  if (!is_accepted_ || !is_regular() || ::fstat(file_.descriptor(), &file) != 0 ||
      file.st_nlink != 0)
    return std::nullopt;
  return Error(ErrorCode::kIo,
               fmt::format("{} \"{}\" has been removed or replaced by another process: what this "
                           "one has written there is lost; give each run a file of its own",
                           option_, place_.path));
}

void OutputFile::write(std::string_view bytes) {
  if (!is_wanted()) return;
  begin();
  if (const auto lost = loss()) throw *lost;
  if (!is_regular()) flush_said();  // what was said before stands before
  const std::uint64_t before_bytes = size_bytes_;
  int error = append(bytes);
  if (error == 0 && is_regular()) error = write_back();
  if (error == 0) return;
  if (is_regular()) {  // what is written later stands behind `before_bytes`, without a gap
    (void)::ftruncate(descriptor(), static_cast<off_t>(before_bytes));
    (void)::lseek(descriptor(), static_cast<off_t>(before_bytes), SEEK_SET);
    size_bytes_ = before_bytes;
    written_back_bytes_ = std::min(written_back_bytes_, before_bytes);
  }
  throw failure("write", error);
}

// Returns 0 or an errno.
int OutputFile::append(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : EIO;
    bytes.remove_prefix(static_cast<std::size_t>(written));
    size_bytes_ += static_cast<std::uint64_t>(written);
  }
  return 0;
}

// The kernel would keep as much as memory allows, and the fsync at the end would then take minutes,
// while other ranks wait for this one under sharding.timeout. So pieces go to the drive as they
// come, one under way while the next is written. The kernel may report a page that it could not
// write only once: here, and then not in fsync. Returns 0 or an errno.
int OutputFile::write_back() {
  int error = 0;
  const auto sync = [&](std::uint64_t begin, unsigned flags) {
    if (::sync_file_range(descriptor(), static_cast<off_t>(begin), kWriteBackBytes, flags) != 0 &&
        error == 0 && !is_refusal_to_write_back(errno))
      error = errno;
  };
  for (; size_bytes_ - written_back_bytes_ >= kWriteBackBytes;
       written_back_bytes_ += kWriteBackBytes) {
    sync(written_back_bytes_, SYNC_FILE_RANGE_WRITE);
    if (written_back_bytes_ >= kWriteBackBytes)
      sync(written_back_bytes_ - kWriteBackBytes,
           SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  }
  return error;
}

void OutputFile::empty_buffer() {
  write(buffer_);
  buffer_.clear();
}

void OutputFile::accept() noexcept {
  if (!is_wanted() || is_accepted_) return;
  const int error = is_regular() ? file_.replace_target() : 0;
  is_accepted_ = error == 0;
  if (error != 0)
    warn("sluice: {}; it is tried again at the end\n", failure("rename", error).what());
}

void OutputFile::commit() {
  if (!is_wanted()) return;
  begin();
  empty_buffer();
  if (is_regular()) {
    make_durable();
  } else if (const int error = closing_error(descriptor()); error != 0) {
    throw failure("close", error);
  }
  is_accepted_ = true;
  discard();
}

void OutputFile::make_durable() {
  if (const auto lost = loss()) throw *lost;
  if (const int error = flush_file(descriptor()); error != 0) throw failure("fsync", error);
  if (!is_accepted_) {
    if (const int error = file_.replace_target(); error != 0) {
      const std::string name = file_.name();
      file_.keep();
      throw Error(
          file_error_code(error, ErrorCode::kIo),
          fmt::format("cannot write {} \"{}\": rename: {}; the whole file is \"{}\"; rename it",
                      option_, place_.path, errno_text(error), name));
    }
    is_accepted_ = true;
  }
  // Without this, a power cut could take the name back.
  if (const int error = flush_folder(place_.folder); error != 0)
    throw failure("fsync of its folder", error);
}

void OutputFile::discard() noexcept {
  file_ = TemporaryFile();
  opened_ = UniqueFd();
  buffer_.clear();
}

void OutputFiles::add_input(std::string what, const std::string& path, std::string_view successor) {
  if (path.empty()) return;
  const FilePlace place = place_of(path);
  if (place.kind == FileKind::kFolder) {
    std::error_code error;  // a folder that cannot be read is refused where it is used
    for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end;
         entry.increment(error)) {
      if (entry->is_regular_file(error)) add_input(what, entry->path().string(), successor);
    }
    return;
  }
  inputs_.push_back({std::move(what), place, std::string(successor)});
}

OutputFile& OutputFiles::add(std::string option, const std::string& path, OutputMode mode) {
  outputs_.push_back(std::make_unique<OutputFile>(std::move(option), path, mode));
  return *outputs_.back();
}

void OutputFiles::reserve(std::string option, const std::string& path) {
  if (!path.empty()) reserved_.push_back({std::move(option), place_of(path), {}});
}

void OutputFiles::compare() const {
  const auto refuse = [](const OutputFile& output, const std::string& what,
                         const std::string& path) {
    throw Error(ErrorCode::kInput,
                fmt::format("{} \"{}\" is the same file as {}{}, which it would destroy; name "
                            "another file",
                            output.option(), output.path(), what,
                            path.empty() ? "" : fmt::format(" \"{}\"", path)));
  };
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const OutputFile& output = *outputs_[i];
    if (!output.is_wanted()) continue;
    for (const Named& input : inputs_) {
      if (is_same_file(output.place(), input.place) && output.option() != input.successor)
        refuse(output, input.what, input.place.path);
    }
    for (const Named& other : reserved_) {
      if (is_same_file(output.place(), other.place)) refuse(output, other.what, other.place.path);
    }
    if (output.place().descriptor) continue;  // one stream: what comes later stands behind
    for (std::size_t j = 0; j < outputs_.size(); ++j) {
      if (j != i && is_same_file(output.place(), outputs_[j]->place()))
        refuse(output, outputs_[j]->option(), outputs_[j]->path());
    }
    if (is_same_file(output.place(), place_of_descriptor(STDOUT_FILENO)))
      refuse(output, "standard output", "");
    if (is_same_file(output.place(), place_of_descriptor(STDERR_FILENO)))
      refuse(output, "standard error", "");
  }
}

void OutputFiles::check() {
  compare();
  for (const auto& output : outputs_) {
    output->check();
    if (!output->is_wanted() || !output->is_regular()) continue;
    for (const std::string& name : leftovers_of(output->place().target))
      warn("sluice: \"{}\" is the part of \"{}\" that a killed process had written; remove it\n",
           name, output->path());
  }
}

void write_whole(OutputFile& output, std::string_view text) {
  output.write(text);
  output.commit();
}

void FirstFailure::rethrow() const {
  if (first_ != nullptr) std::rethrow_exception(first_);
}

// Requires: inside the handler of `error`.
void FirstFailure::note(const std::exception& error) {
  if (first_ != nullptr) return warn("sluice: {}\n", error.what());
  first_ = std::current_exception();
}

}  // namespace sluice
