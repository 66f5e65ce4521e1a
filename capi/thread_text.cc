#include "capi/thread_text.h"

#include <array>
#include <memory>
#include <string>
#include <utility>

namespace sluice {
namespace {

// Trivial, so that no thread ever sees it destroyed.
constinit thread_local std::array<std::string*, static_cast<std::size_t>(ThreadText::kCount)>
    thread_texts{};
constinit thread_local bool holder_is_gone = false;

// Frees the texts at the end of the thread. Those that a later destructor of the same thread keeps
// stay for as long as the process.
struct TextHolder {
  bool is_used = false;
  ~TextHolder() {
    for (std::string*& text : thread_texts) delete std::exchange(text, nullptr);
    holder_is_gone = true;
  }
};
thread_local TextHolder text_holder;

std::string*& slot_of(ThreadText kind) {
  return thread_texts[static_cast<std::size_t>(kind)];
}

}  // namespace

const char* keep_text(ThreadText kind, std::string_view text) {
  delete std::exchange(slot_of(kind), nullptr);
  slot_of(kind) = new std::string(text);
  if (!holder_is_gone) text_holder.is_used = true;  // the first use makes it
  return slot_of(kind)->c_str();
}

const char* kept_text(ThreadText kind) noexcept {
  const std::string* const text = slot_of(kind);
  return text == nullptr ? "" : text->c_str();
}

}  // namespace sluice
