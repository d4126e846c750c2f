// Sockets of the operating system. gRPC gets its connections from here: it would stop
// listening for good when descriptors run out, and it does not check who is behind a
// unix socket.

#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "sync.h"
#include "transport.h"

namespace torchbeast {

// Owns a descriptor. One thread at a time.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Listens at an address. One thread at a time.
class ListeningSocket {
 public:
  // Throws std::runtime_error, with the reason, if that can't be: no such directory, in
  // use by a running server, ... A unix socket that a dead server has left is replaced;
  // the one made here is the user's alone.
  explicit ListeningSocket(const Address& address);
  ~ListeningSocket();  // removes the unix socket, unless another is in its place
  ListeningSocket(const ListeningSocket&) = delete;

  // The next connection; -1 if none comes within `timeout`. The caller owns it. Some
  // descriptors stay free for the rest of the process: a connection that would take one
  // of them is closed.
  int accept(Milliseconds timeout);

  int port() const { return port_; }

 private:
  void listen_unix(const Address& address);
  void listen_tcp(const Address& address);

  std::vector<Descriptor> sockets_;
  std::string path_;
  ino_t inode_ = 0;
  int port_ = 0;
};

// A connection to a unix socket. What is said there must not reach other users: the
// other side must be a process of this user or of root, if not `anybody`. Throws
// TransportError. The caller owns the descriptor.
int dial_unix(const Address& address, bool anybody);

// Raises the limit of open files as far as the system allows, once per process.
void raise_descriptor_limit();

}  // namespace torchbeast
