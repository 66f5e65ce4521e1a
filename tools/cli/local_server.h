// A web server for one user of this machine. It listens on 127.0.0.1 and answers GET requests whose
// address ends with `?token=` and its token, which no other user knows.
//
// Thread rule: one thread.
// Invariants: a client that is slow or silent delays no other. It is dropped after a few seconds,
// whether or not it sends a byte now and then. If there are too many clients, a new client replaces
// the oldest one that is not receiving an answer.
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
  // Returns nothing for a path that does not exist.
  using Respond = std::function<std::optional<WebAnswer>(std::string_view path)>;

  static constexpr std::size_t kClientsMax = 32;

  // Port 0 stands for any free port. Draws the token. A client has `client_time` for its request,
  // and as long again for the answer.
  // Fails with: kConfig, naming the port, if it is in use or may not be taken.
  explicit LocalServer(std::uint16_t port, std::chrono::milliseconds client_time = kClientTime);

  // The address of the first page, with the token.
  std::string address() const;
  // Waits up to `timeout_ms` for clients, or until a signal, and answers those that have asked.
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

  // The oldest client that is not receiving an answer, or the end.
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
