#include "tools/cli/local_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {
namespace {

constexpr std::size_t kRequestBytesMax = 16384;

std::string draw_token() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw Error(ErrorCode::kIo,
                fmt::format("cannot draw a token for the page: {}", errno_text(errno)));
  std::string token;
  for (const unsigned char byte : bytes) token += fmt::format("{:02x}", byte);
  return token;
}

// In a time that does not depend on how much of the token was right.
bool is_equal(std::string_view given, std::string_view token) {
  if (given.size() != token.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < token.size(); ++i)
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(token[i]);
  return difference == 0;
}

std::string http_text(std::string_view status, const WebAnswer& answer) {
  return fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: {}; charset=utf-8\r\nContent-Length: {}\r\n"
      "Connection: close\r\nCache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n"
      "X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n"
      "Content-Security-Policy: default-src 'none'; script-src 'unsafe-inline'; "
      "style-src 'unsafe-inline'; connect-src 'self'\r\n\r\n{}",
      status, answer.type, answer.body.size(), answer.body);
}

std::string refusal(std::string_view status, std::string_view words) {
  return http_text(status, {.type = "text/plain", .body = fmt::format("{}\n", words)});
}

}  // namespace

LocalServer::LocalServer(std::uint16_t port, std::chrono::milliseconds client_time)
    : client_time_(client_time), token_(draw_token()) {
  const auto fail = [&](const char* what, const char* remedy) {
    throw Error(ErrorCode::kConfig, fmt::format("cannot {} port {} of 127.0.0.1: {}; {}", what,
                                                port, errno_text(errno), remedy));
  };
  constexpr const char* kRemedy = "pass another --port, or none for any that is free";
  socket_ = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket_) fail("make a socket for", "this machine may lack IPv4");
  // Connections that have just ended would keep the port for a minute.
  const int on = 1;
  (void)::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  socklen_t length = sizeof address;
  if (::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0)
    fail("take", kRemedy);
  if (::listen(socket_.get(), kClientsMax) != 0) fail("listen on", kRemedy);
  if (::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    fail("look up", kRemedy);
  port_ = ntohs(address.sin_port);
}

std::string LocalServer::address() const {
  return fmt::format("http://127.0.0.1:{}/?token={}", port_, token_);
}

void LocalServer::serve(int timeout_ms, const Respond& respond) {
  std::vector<pollfd> polled;
  for (const Client& client : clients_)
    polled.push_back({.fd = client.socket.get(),
                      .events = static_cast<short>(client.answer.empty() ? POLLIN : POLLOUT),
                      .revents = 0});
  const bool has_room = clients_.size() < kClientsMax || oldest_without_answer() != clients_.end();
  polled.push_back({.fd = has_room ? socket_.get() : -1, .events = POLLIN, .revents = 0});
  (void)::poll(polled.data(), polled.size(), timeout_ms);  // after a failure, nothing is ready
  const auto now = std::chrono::steady_clock::now();
  std::vector<Client> rest;
  for (std::size_t i = 0; i < clients_.size(); ++i) {
    // Bytes that trickle in win a client no time.
    const bool is_done =
        (polled[i].revents != 0 && attend(clients_[i], respond)) || now > clients_[i].deadline;
    if (!is_done) rest.push_back(std::move(clients_[i]));
  }
  clients_ = std::move(rest);
  if (polled.back().revents != 0) admit();
}

std::vector<LocalServer::Client>::iterator LocalServer::oldest_without_answer() {
  return std::ranges::find_if(clients_, [](const Client& client) { return client.answer.empty(); });
}

void LocalServer::admit() {
  UniqueFd socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket) return;  // the client has gone again, or there are no descriptors at the moment
  if (clients_.size() >= kClientsMax) {
    // Those that were silent when poll() was called may have been answered since.
    const auto oldest = oldest_without_answer();
    if (oldest == clients_.end()) return;
    clients_.erase(oldest);
  }
  clients_.push_back({.socket = std::move(socket),
                      .deadline = std::chrono::steady_clock::now() + client_time_,
                      .request = {},
                      .answer = {}});
}

bool LocalServer::attend(Client& client, const Respond& respond) const {
  if (client.answer.empty()) {
    std::array<char, 4096> piece{};
    const ssize_t got = ::recv(client.socket.get(), piece.data(), piece.size(), 0);
    if (got < 0) return errno != EAGAIN && errno != EINTR;
    if (client.is_answered) return got == 0;
    client.request.append(piece.data(), static_cast<std::size_t>(got));
    const bool is_whole = client.request.find("\r\n\r\n") != std::string::npos;
    if (client.request.size() > kRequestBytesMax)
      client.answer = refusal("431 Request Header Fields Too Large", "the request is too long");
    else if (is_whole)
      client.answer = answer_to(client.request, respond);
    else
      return got == 0;
    client.deadline = std::chrono::steady_clock::now() + client_time_;
  }
  const ssize_t sent =
      ::send(client.socket.get(), client.answer.data(), client.answer.size(), MSG_NOSIGNAL);
  if (sent < 0) return errno != EAGAIN && errno != EINTR;
  client.answer.erase(0, static_cast<std::size_t>(sent));
  // Closing a socket with unread bytes resets the connection, and the answer may be lost with it.
  // So the rest is read until the client has closed its side, too.
  client.is_answered = client.answer.empty();
  return client.is_answered && ::shutdown(client.socket.get(), SHUT_WR) != 0;
}

std::string LocalServer::answer_to(std::string_view request, const Respond& respond) const {
  const std::string_view line = request.substr(0, request.find("\r\n"));
  const std::size_t method_end = line.find(' ');
  const std::size_t target_end = line.find(' ', method_end + 1);
  if (method_end == std::string_view::npos || target_end == std::string_view::npos)
    return refusal("400 Bad Request", "this is no HTTP request");
  if (line.substr(0, method_end) != "GET")
    return refusal("405 Method Not Allowed", "this page can only be read: use GET");
  const std::string_view target = line.substr(method_end + 1, target_end - method_end - 1);
  const std::size_t path_end = std::min(target.find('?'), target.size());
  constexpr std::string_view kKey = "?token=";
  const std::string_view query = target.substr(path_end);
  if (!query.starts_with(kKey) || !is_equal(query.substr(kKey.size()), token_))
    return refusal("403 Forbidden",
                   "the token is wrong or missing: open the address that the command has printed, "
                   "which is another one each time");
  const std::optional<WebAnswer> answer = respond(target.substr(0, path_end));
  return answer ? http_text("200 OK", *answer)
                : refusal("404 Not Found", "this address has no page");
}

}  // namespace sluice
