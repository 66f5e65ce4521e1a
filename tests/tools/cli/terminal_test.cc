#include "tools/cli/terminal.h"

#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

#include <gtest/gtest.h>

namespace sluice {
namespace {

TEST(Fitted, LeavesWhatFits) {
  EXPECT_EQ(fitted("one two\nthree\n", 7), "one two\nthree\n");
  EXPECT_EQ(fitted("", 7), "");
  EXPECT_EQ(fitted("\n\n", 7), "\n\n");
}

TEST(Fitted, BreaksBetweenWords) {
  EXPECT_EQ(fitted("one two three four", 9), "one two\nthree\nfour");
  EXPECT_EQ(fitted("one two three four\n", 13), "one two three\nfour\n");
}

TEST(Fitted, KeepsTheLastColumn) {
  EXPECT_EQ(fitted("tier  size  units that come and go\n", 24),
            "tier  size  units that\n            come and go\n");
  // A column that begins beyond three fifths of the width has no room: the one before counts.
  EXPECT_EQ(fitted("tier  size of all  text that breaks", 24),
            "tier  size of all  text\n      that breaks");
}

TEST(Fitted, LeavesLongWordsWhole) {
  EXPECT_EQ(fitted("see /a/very/long/path/that/has/no/space now", 12),
            "see\n/a/very/long/path/that/has/no/space\nnow");
}

TEST(Fitted, CountsWhatIsSeen) {
  EXPECT_EQ(fitted("\x1b[32mok\x1b[0m  four five", 13), "\x1b[32mok\x1b[0m  four five");
  EXPECT_EQ(fitted("\x1b[32mok\x1b[0m  four five", 12), "\x1b[32mok\x1b[0m  four\n    five");
  EXPECT_EQ(fitted("\xc3\xa4\xc3\xa4 \xc3\xb6\xc3\xb6", 5), "\xc3\xa4\xc3\xa4 \xc3\xb6\xc3\xb6");
}

TEST(Fitted, EndsOnAnyWidth) {
  const std::string text = "tier  size  units that come and go, and what is beside them";
  for (std::size_t columns = 0; columns <= text.size() + 1; ++columns) {
    std::string words = fitted(text, columns);
    std::erase_if(words, [](char c) { return c == ' ' || c == '\n'; });
    std::string expected = text;
    std::erase_if(expected, [](char c) { return c == ' '; });
    EXPECT_EQ(words, expected) << columns;
  }
}

TEST(FirstColumns, LettersStayWhole) {
  EXPECT_EQ(first_columns("\xc3\xa4\xc3\xb6\xc3\xbc", 2), "\xc3\xa4\xc3\xb6");
  EXPECT_EQ(first_columns("\x1b[32mok\x1b[0m", 1), "\x1b[32mo");
  EXPECT_EQ(first_columns("abc", 0), "");
  EXPECT_EQ(first_columns("abc", 9), "abc");
}

TEST(PlainText, ChangesNoTerminal) {
  EXPECT_EQ(plain_text("a\tb\n\xc3\xa4\xc2\xa0~"), "a\tb\n\xc3\xa4\xc2\xa0~");
  const std::string mark = "\xef\xbf\xbd";
  EXPECT_EQ(plain_text("\x1b[31m\a\r"), mark + "[31m" + mark + mark);
  EXPECT_EQ(plain_text("\x7f\xc2\x9b\x9b\xe2\x82"), mark + mark + mark + mark + mark);
  EXPECT_EQ(plain_text(std::string_view("\0", 1)), mark);
}

// Descriptors that are no terminal: what a file gets has no escape sequences.
TEST(Coloured, LeavesFilesPlain) {
  EXPECT_EQ(coloured(-1, Colour::kBad, "text"), "text");
}

// Standard error is a terminal of `columns` while it lives.
class Terminal {
 public:
  explicit Terminal(unsigned short columns) : stderr_(::dup(STDERR_FILENO)) {
    winsize size{};
    size.ws_col = columns;
    int terminal = -1;
    EXPECT_EQ(::openpty(&main_, &terminal, nullptr, nullptr, &size), 0);
    ::dup2(terminal, STDERR_FILENO);
    ::close(terminal);
  }
  ~Terminal() { ::close(main_); }

  // Ends it, and returns what it has been shown.
  std::string shown() {
    ::dup2(stderr_, STDERR_FILENO);
    ::close(stderr_);
    std::string text;
    char piece[512];
    for (ssize_t bytes = 0; (bytes = ::read(main_, piece, sizeof piece)) > 0;)
      text.append(piece, static_cast<std::size_t>(bytes));
    return text;
  }

 private:
  int stderr_;
  int main_ = -1;
};

TEST(Progress, SaysWhatTakesLongAndGoes) {
  Terminal terminal(20);
  {
    Progress progress("first");
    progress.set("counting all of the sheep");
    std::this_thread::sleep_for(std::chrono::milliseconds(2200));
  }
  const std::string shown = terminal.shown();
  EXPECT_EQ(shown.substr(0, 1 + 19), "\rcounting all of the") << "one column is left free";
  EXPECT_TRUE(shown.ends_with("\r\x1b[K"));
}

TEST(Progress, SaysNothingOfWhatIsQuick) {
  Terminal terminal(80);
  { const Progress progress("quick"); }
  { const Progress progress("quiet", /*is_quiet=*/true); }
  EXPECT_EQ(terminal.shown(), "");
}

}  // namespace
}  // namespace sluice
