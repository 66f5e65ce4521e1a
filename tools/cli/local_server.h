// A web server for one user of this machine. The server listens on 127.0.0.1 and answers GET
// requests. The address of a request must end with `?token=` and the server's token, which no other
// user knows.
//
// Thread rule: one thread.
// Invariants: a slow or silent client does not delay other clients. Such a client is dropped after
// a few seconds, even if it sends a byte now and then. If there are too many clients, a new client
// replaces the oldest one that is not receiving an answer.
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
  // The function returns nothing for a path that does not exist.
  using Respond = std::function<std::optional<WebAnswer>(std::string_view path)>;

  static constexpr std::size_t kClientsMax = 32;

  // Port 0 stands for any free port. The constructor draws the token. A client has `client_time` to
  // send its request, and the same time to receive the answer.
  // Fails with kConfig, naming the port, if the port is in use or may not be taken.
  explicit LocalServer(std::uint16_t port, std::chrono::milliseconds client_time = kClientTime);

  // The address of the first page, with the token.
  std::string address() const;
  // Waits for clients, for at most `timeout_ms` or until a signal comes. Then answers the clients
  // that have asked.
  void serve(int timeout_ms, const Respond& respond);

 private:
  static constexpr std::chrono::seconds kClientTime{5};

  struct Client {
    UniqueFd socket;
    std::chrono::steady_clock::time_point deadline;
    std::string request;
    std::string answer;        // what is still to be sent
    bool is_answered = false;  // what it still sends is read and thrown away
  };

  // The oldest client that is not receiving an answer. If there is no such client, the result is
  // the end of the list.
  std::vector<Client>::iterator oldest_without_answer();
  void admit();
  // Whether the client is done.
  bool attend(Client& client, const Respond& respond) const;
  std::string answer_to(std::string_view request, const Respond& respond) const;

  std::chrono::milliseconds client_time_;
  std::uint16_t port_ = 0;
  std::string token_;
  UniqueFd socket_;
  std::vector<Client> clients_;
};

}  // namespace sluice
