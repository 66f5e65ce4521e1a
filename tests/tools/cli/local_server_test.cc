// The web server of `sluice top --web`, call by call: no assertion here depends on the time that a
// call takes.
#include "tools/cli/local_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"

namespace sluice::test {
namespace {

constexpr std::chrono::hours kLong{1};

std::uint16_t port_of(const LocalServer& server) {
  const std::string address = server.address();
  const std::size_t colon = address.rfind(':');
  return static_cast<std::uint16_t>(std::stoi(address.substr(colon + 1)));
}

std::optional<WebAnswer> answer_with(std::string_view path) {
  return WebAnswer{.type = "text/plain", .body = "page " + std::string(path)};
}

class LocalServerTest : public testing::Test {
 protected:
  UniqueFd connect_to(LocalServer& server) const {
    UniqueFd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port_of(server));
    EXPECT_EQ(::connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address),
              0);
    server.serve(0, answer_with);
    return client;
  }

  void send_to(const UniqueFd& client, const std::string& text) const {
    EXPECT_EQ(::send(client.get(), text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
  }

  std::string request_of(const LocalServer& server) const {
    const std::string address = server.address();
    return "GET " + address.substr(address.find("/?")) + " HTTP/1.1\r\n\r\n";
  }

  // All that has come; `end` becomes "open", "closed" or "reset".
  std::string received(const UniqueFd& client, std::string& end) const {
    std::string text;
    std::array<char, 4096> piece{};
    for (;;) {
      const ssize_t got = ::recv(client.get(), piece.data(), piece.size(), MSG_DONTWAIT);
      if (got <= 0) {
        end = got == 0 ? "closed" : errno == EAGAIN ? "open" : "reset";
        return text;
      }
      text.append(piece.data(), static_cast<std::size_t>(got));
    }
  }
};

TEST_F(LocalServerTest, SilentClientsDelayNoOther) {
  LocalServer server(0, kLong);
  std::vector<UniqueFd> silent;
  for (std::size_t i = 0; i < LocalServer::kClientsMax + 8; ++i)
    silent.push_back(connect_to(server));
  const UniqueFd client = connect_to(server);
  send_to(client, request_of(server));
  for (int i = 0; i < 8; ++i) server.serve(0, answer_with);
  std::string end;
  EXPECT_TRUE(received(client, end).ends_with("page /"));
  EXPECT_EQ(end, "closed");
  // The oldest have made room, and only they.
  for (std::size_t i = 0; i < silent.size(); ++i) {
    EXPECT_EQ(received(silent[i], end), "");
    EXPECT_EQ(end, i < 9 ? "closed" : "open") << i;
  }
}

TEST_F(LocalServerTest, AClientThatTricklesIsDropped) {
  LocalServer server(0, std::chrono::milliseconds(0));
  const UniqueFd client = connect_to(server);
  send_to(client, "G");
  server.serve(0, answer_with);
  std::string end;
  EXPECT_EQ(received(client, end), "");
  EXPECT_NE(end, "open");
}

TEST_F(LocalServerTest, ARequestThatIsTooLongIsAnsweredWithoutAReset) {
  LocalServer server(0, kLong);
  const UniqueFd client = connect_to(server);
  send_to(client, "GET / HTTP/1.1\r\nX-Long: " + std::string(60000, 'x'));
  for (int i = 0; i < 8; ++i) server.serve(0, answer_with);
  std::string end;
  EXPECT_TRUE(received(client, end).starts_with("HTTP/1.1 431 "));
  EXPECT_EQ(end, "closed");
  // Once the client has closed its side, nothing is left.
  EXPECT_EQ(::shutdown(client.get(), SHUT_WR), 0);
  for (int i = 0; i < 20; ++i) server.serve(0, answer_with);
  EXPECT_EQ(received(client, end), "");
  EXPECT_EQ(end, "closed");
}

}  // namespace
}  // namespace sluice::test
