// Texts that calls of the C interface return. A text belongs to the calling thread, and is valid
// until the thread keeps the next text of the same kind. Thread rule: any thread.
//
// glibc destroys the variables of the main thread before exit() runs the program's atexit()
// functions and static destructors. A program may call Sluice there: to close an engine, and to ask
// why that failed. So a thread may keep texts after the end of its variables, too.
#pragma once

#include <cstdint>
#include <string_view>

namespace sluice {

enum class ThreadText : std::uint8_t {
  kLastError,
  kImportedConfig,
  kReadConfig,
  kPlan,
  kWhyNoGpu,
  kGpuRanksId,
  kCount,  // not a text
};

// Copies `text`, and returns the copy. Throws std::bad_alloc. Then the old text is gone, too.
const char* keep_text(ThreadText kind, std::string_view text);
// Returns the text that the thread has kept last, or "" if there is none.
const char* kept_text(ThreadText kind) noexcept;

}  // namespace sluice
