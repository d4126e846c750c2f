// Sockets of the operating system. gRPC gets its connections from here: it would stop
// listening for good when descriptors run out, and it does not check who is behind a
// unix socket.

#pragma once

#include <sys/types.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sync.h"
#include "transport.h"

namespace torchbeast {

// Which file a descriptor is of; a later one with the same number has another.
using FileId = std::pair<dev_t, ino_t>;

// Owns a descriptor. A process that this one forks closes it at once: else a helper of
// an environment would keep the address and the connections of a server that has died.
// One thread at a time.
class Descriptor {
 public:
  explicit Descriptor(int fd);
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  // The caller closes it. Forks still do, too.
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// The right to listen at the path of a unix socket, which one server at a time has: a
// lock on the file "<path>.lock". It ends with the process. One thread at a time.
class PathLock {
 public:
  // Throws std::runtime_error, with the reason.
  explicit PathLock(const Address& address);
  ~PathLock();  // removes the file
  PathLock(const PathLock&) = delete;

 private:
  const std::string path_;  // of the file, absolute
  const Descriptor file_;
};

// Listens at an address. One thread at a time.
class ListeningSocket {
 public:
  // Throws std::runtime_error, with the reason, if that can't be: no such directory, in
  // use by a running server, ... A unix socket that a dead server has left is replaced;
  // the one made here is the user's alone.
  explicit ListeningSocket(const Address& address);
  ~ListeningSocket();  // removes the unix socket
  ListeningSocket(const ListeningSocket&) = delete;

  // The next connection; -1 if none comes within `timeout`. The caller owns it. Some
  // descriptors stay free for the rest of the process: a connection that would take one
  // of them is closed.
  int accept(Milliseconds timeout);

  int port() const { return port_; }

 private:
  void listen_unix(const Address& address);
  void listen_tcp(const Address& address, int num_tries = 10);

  std::optional<PathLock> lock_;  // the last to end
  std::vector<Descriptor> sockets_;
  std::string path_;  // absolute; empty: TCP
  int port_ = 0;
};

// gRPC makes it the TCP_USER_TIMEOUT of sockets that it dials for this library: they
// are known by this odd number.
constexpr int kPingTimeoutMs = 10'007;

// Connections that gRPC owns and has no call to close, by the names that it gives to
// their peers, as ServerContext::peer() and ClientContext::peer() say. Thread-safe.
class PeerConnections {
 public:
  // Accepted here; it may be closed any time.
  void add(int fd) TB_EXCLUDES(mutex_);
  // All that gRPC has dialled for this library over TCP. Forks close them.
  void add_dialled() TB_EXCLUDES(mutex_);
  // A stream has ended badly. Its connection is closed if that was one of many in a
  // short time: opening and ending streams costs the peer less than this process.
  void count_failure(const std::string& peer) TB_EXCLUDES(mutex_);
  // A call there has shown the token, or a server its hello.
  void welcome(const std::string& peer) TB_EXCLUDES(mutex_);
  // Closes connections to strangers that are older than `limit` or have sent more bytes
  // than this: what belongs to no call costs threads and descriptors, too. A unix
  // socket's bytes are not known.
  void drop_strangers(Milliseconds limit, uint64_t most_bytes) TB_EXCLUDES(mutex_);

 private:
  struct Connection {
    std::string peer;
    FileId file;
    Clock::time_point since = Clock::now();
    bool is_stranger = true;
    double num_failures = 0;
    Clock::time_point last_failure = since;
  };
  template <typename F>
  void for_each_of(const std::string& peer, const F& f) TB_REQUIRES(mutex_);

  Mutex mutex_;
  std::map<int, Connection> connections_ TB_GUARDED_BY(mutex_);  // by descriptor
};

// Those that this process has dialled.
PeerConnections& dialled_connections();
// To be called now and then while a server is dialled, which is cut if it sends more
// than this before its hello.
void bound_dialled(uint64_t most_bytes);

// A connection to a unix socket. What is said there must not reach other users: the
// other side must be a process of this user or of root, if not `anybody`. Throws
// TransportError. The caller owns the descriptor.
int dial_unix(const Address& address, bool anybody);

}  // namespace torchbeast
