// A web server for one user of this machine. The server listens on 127.0.0.1 and answers GET
// requests. The address of a request must end with `?token=` and the server's token. Other users of
// the machine do not know the token.
//
// Thread rule: one thread.
// Invariants: a slow or silent client does not delay other clients. The server drops a slow or
// silent client after a few seconds, even if the client sends a byte now and then. If there are too
// many clients, a new client replaces the oldest client that is not receiving an answer.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"

namespace sluice {

struct WebAnswer {
  std::string type;  // such as "text/html"
  std::string body;
};

class LocalServer {
 public:
  // A function that returns the answer to a request for `path`. The function returns nothing if the
  // path does not exist.
  using Respond = std::function<std::optional<WebAnswer>(std::string_view path)>;

  static constexpr std::size_t kClientsMax = 32;

  // If `port` is 0, the constructor chooses a free port. The constructor also makes a random token.
  // A client must send its request within `client_time`. The client must then receive the answer
  // within another `client_time`.
  // Fails with kConfig if the port is in use or not allowed. The message names the port.
  explicit LocalServer(std::uint16_t port, std::chrono::milliseconds client_time = kClientTime);

  // The address of the first page, with the token.
  std::string address() const;
  // Waits until clients send something, or until `timeout_ms` have passed. A signal also ends the
  // wait. Then the call answers all clients whose requests are complete.
  void serve(int timeout_ms, const Respond& respond);

 private:
  static constexpr std::chrono::seconds kClientTime{5};

  struct Client {
    UniqueFd socket;
    std::chrono::steady_clock::time_point deadline;
    std::string request;
    std::string answer;        // the rest of the answer, which must still be sent
    bool is_answered = false;  // true: further input is read and thrown away
  };

  // Returns the oldest client that is not receiving an answer, or the end of the list if there is
  // no such client.
  std::vector<Client>::iterator oldest_without_answer();
  void admit();
  // Serves `client`, and returns whether this client is done.
  bool attend(Client& client, const Respond& respond) const;
  std::string answer_to(std::string_view request, const Respond& respond) const;

  std::chrono::milliseconds client_time_;
  std::uint16_t port_ = 0;
  std::string token_;
  UniqueFd socket_;
  std::vector<Client> clients_;
};

}  // namespace sluice
