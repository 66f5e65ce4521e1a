// A web server for one user of this machine. It listens on 127.0.0.1 and answers GET requests whose
// address ends with `?token=` and its token, which no other user knows.
//
// Thread rule: one thread.
// Invariants: a client that is slow or silent delays no other. It is dropped after a few seconds.
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
  // Nothing for a path that is not there.
  using Respond = std::function<std::optional<WebAnswer>(std::string_view path)>;

  // Port 0 is any free one. Draws the token.
  // Fails with: kConfig, naming the port, if it is in use or may not be taken.
  explicit LocalServer(std::uint16_t port);

  // The address of the first page, with the token.
  std::string address() const;
  // Waits up to `timeout_ms` for clients, or until a signal, and answers those that have asked.
  void serve(int timeout_ms, const Respond& respond);

 private:
  struct Client {
    UniqueFd socket;
    std::chrono::steady_clock::time_point deadline;
    std::string request;
    std::string answer;  // what is still to be sent
  };

  void admit();
  // Whether the client is done.
  bool attend(Client& client, const Respond& respond) const;
  std::string answer_to(std::string_view request, const Respond& respond) const;

  std::uint16_t port_ = 0;
  std::string token_;
  UniqueFd socket_;
  std::vector<Client> clients_;
};

}  // namespace sluice
