#include "sockets.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#ifdef __linux__
#include <linux/tcp.h>  // TCP_INFO has bytes_received
#else
#include <netinet/tcp.h>
#endif
#include <poll.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <string>

namespace torchbeast {

namespace {

constexpr int kSpareDescriptors = 64;

[[noreturn]] void cannot_listen(const Address& address, const std::string& reason) {
  throw std::runtime_error("cannot listen on " + address.to_string() + ": " + reason);
}

// Environments may change the working directory.
std::string absolute(const std::string& path) {
  std::error_code failure;
  const auto found = std::filesystem::absolute(path, failure);
  return failure ? path : found.string();
}

FileId file_of(int fd) {
  struct stat status;
  return fstat(fd, &status) == 0 ? FileId(status.st_dev, status.st_ino) : FileId();
}
bool is_open(int fd, const FileId& file) {
  return file != FileId() && file_of(fd) == file;
}

// What forks close. Thread-safe; no fork happens while it changes.
class NotInForks {
 public:
  static NotInForks& instance() {
    static NotInForks* const one = new NotInForks;  // forks may come until the end
    return *one;
  }
  // Whether it was not there.
  bool add(int fd, const FileId& file) TB_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return std::exchange(files_[fd], file) != file;
  }
  // In a fork, it was closed already, and the number may be another file's.
  void close(int fd) TB_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (files_.erase(fd) > 0) ::close(fd);
  }

 private:
  NotInForks() { pthread_atfork(lock, unlock, close_all); }
  // Around a fork, which Clang's analysis does not see.
  static void lock() TB_ATTRIBUTE(no_thread_safety_analysis) {
    instance().mutex_.lock();
  }
  static void unlock() TB_ATTRIBUTE(no_thread_safety_analysis) {
    instance().mutex_.unlock();
  }
  static void close_all() TB_ATTRIBUTE(no_thread_safety_analysis) {
    for (const auto& [fd, file] : instance().files_) {
      if (is_open(fd, file)) ::close(fd);
    }
    instance().files_.clear();
    unlock();
  }

  Mutex mutex_;
  std::map<int, FileId> files_ TB_GUARDED_BY(mutex_);
};

// Binds or connects a unix socket.
int call_with(int (*f)(int, const sockaddr*, socklen_t), int fd,
              const std::string& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.c_str(), path.size() + 1);
  return f(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name));
}

#ifndef SOCK_CLOEXEC  // macOS
constexpr int SOCK_CLOEXEC = 0;
int accept4(int fd, sockaddr* name, socklen_t* size, int) {
  return ::accept(fd, name, size);
}
#endif

// Not inherited by programs that this process starts, and never blocking. On Linux they
// are made so: another thread may start a program in between.
void set_flags(int fd) {
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL, 0) | O_NONBLOCK);
}

void set_option(int fd, int level, int name, int value) {
  setsockopt(fd, level, name, &value, sizeof(value));
}

Descriptor make_socket(int family) {
  Descriptor made(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (made.get() >= 0) set_flags(made.get());
  return made;
}

// The port in the name of a TCP socket.
in_port_t& port_of(sockaddr* name) {
  return name->sa_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(name)->sin6_port
                                     : reinterpret_cast<sockaddr_in*>(name)->sin_port;
}

// The user whose process has connected, or listens, at the other end.
bool get_peer_user(int fd, uid_t* user) {
#ifdef SO_PEERCRED
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
  *user = peer.uid;
  return true;
#else
  gid_t group;
  return getpeereid(fd, user, &group) == 0;
#endif
}

// The file with a lock that this process has got.
Descriptor lock_file(const Address& address, const std::string& path) {
  while (true) {
    constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
    Descriptor file(open(path.c_str(), kFlags, 0600));
    if (file.get() < 0) cannot_listen(address, path + ": " + std::strerror(errno));
    if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      cannot_listen(address,
                    errno == EWOULDBLOCK
                        ? "another server listens there; stop it or choose another path"
                        : path + ": " + std::strerror(errno));
    }
    // The server that had it may have removed the file since it was opened.
    struct stat found;
    if (lstat(path.c_str(), &found) == 0 &&
        file_of(file.get()) == FileId(found.st_dev, found.st_ino)) {
      return file;
    }
  }
}

}  // namespace

Descriptor::Descriptor(int fd) : fd_(fd) {
  if (fd_ >= 0) NotInForks::instance().add(fd_, file_of(fd_));
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) NotInForks::instance().close(fd_);
}

// --- Listening

PathLock::PathLock(const Address& address)
    : path_(absolute(address.path()) + ".lock"), file_(lock_file(address, path_)) {}

PathLock::~PathLock() { unlink(path_.c_str()); }

ListeningSocket::ListeningSocket(const Address& address) {
  if (address.is_unix()) {
    listen_unix(address);
  } else {
    listen_tcp(address);
  }
}

void ListeningSocket::listen_unix(const Address& address) {
  lock_.emplace(address);
  const char* path = address.path().c_str();
  struct stat status;
  if (lstat(path, &status) == 0 && !S_ISSOCK(status.st_mode)) {
    cannot_listen(address,
                  "there is a file of this name that is not a socket; move it away or "
                  "choose another path");
  }
  unlink(path);
  Descriptor made = make_socket(AF_UNIX);
  // Nobody can connect before listen(), so nobody finds it with other rights.
  if (made.get() < 0 || call_with(bind, made.get(), address.path()) != 0 ||
      chmod(path, 0600) != 0 || listen(made.get(), SOMAXCONN) != 0) {
    cannot_listen(address, std::strerror(errno));
  }
  path_ = absolute(address.path());
  sockets_.push_back(std::move(made));
}

void ListeningSocket::listen_tcp(const Address& address, int num_tries) {
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int failure = getaddrinfo(
      address.host().c_str(), std::to_string(address.port()).c_str(), &hints, &list);
  if (failure != 0) cannot_listen(address, gai_strerror(failure));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
  port_ = address.port();
  int error = 0;
  std::set<std::string> places;
  // localhost is 127.0.0.1 and ::1, and a machine may lack one of them.
  for (const addrinfo* found = list; found != nullptr; found = found->ai_next) {
    const std::string place(reinterpret_cast<const char*>(found->ai_addr),
                            found->ai_addrlen);
    if (!places.insert(place).second) continue;  // /etc/hosts may say it twice
    Descriptor made = make_socket(found->ai_family);
    if (made.get() < 0) {
      error = errno;
      if (error == EAFNOSUPPORT) continue;
      cannot_listen(address, std::strerror(error));
    }
    // A server that is started again gets its port; two at once do not share one.
    set_option(made.get(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (found->ai_family == AF_INET6) {  // [::] is for IPv4, too
      set_option(made.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
    }
    port_of(found->ai_addr) = htons(static_cast<uint16_t>(port_));
    if (bind(made.get(), found->ai_addr, found->ai_addrlen) != 0 ||
        listen(made.get(), SOMAXCONN) != 0) {
      error = errno;
      if (error == EADDRNOTAVAIL) continue;
      // A port that is free on 127.0.0.1 may be in use on ::1.
      if (error == EADDRINUSE && address.port() == 0 && num_tries > 1) {
        sockets_.clear();
        return listen_tcp(address, num_tries - 1);
      }
      cannot_listen(address, std::strerror(error));
    }
    sockaddr_storage name{};
    socklen_t size = sizeof(name);
    getsockname(made.get(), reinterpret_cast<sockaddr*>(&name), &size);
    port_ = ntohs(port_of(reinterpret_cast<sockaddr*>(&name)));
    sockets_.push_back(std::move(made));
  }
  if (sockets_.empty()) cannot_listen(address, std::strerror(error));
}

ListeningSocket::~ListeningSocket() {
  if (!path_.empty()) unlink(path_.c_str());
}

int ListeningSocket::accept(Milliseconds timeout) {
  std::vector<pollfd> waiting;
  for (const Descriptor& one : sockets_) waiting.push_back({one.get(), POLLIN, 0});
  if (poll(waiting.data(), waiting.size(), static_cast<int>(timeout.count())) <= 0) {
    return -1;
  }
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  for (const pollfd& one : waiting) {
    if (one.revents == 0) continue;
    Descriptor accepted(accept4(one.fd, nullptr, nullptr, SOCK_CLOEXEC));
    const int fd = accepted.get();
    if (fd < 0) {
      // The connection waits until there are descriptors again.
      const bool is_short =
          errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      if (is_short) poll(nullptr, 0, static_cast<int>(timeout.count()));
      continue;
    }
    // The system hands out the lowest that is free.
    const auto spare = std::min<rlim_t>(kSpareDescriptors, limit.rlim_cur / 4);
    if (static_cast<rlim_t>(fd) >= limit.rlim_cur - spare) continue;
    set_flags(fd);
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);  // of no effect for unix sockets
    return accepted.release();
  }
  return -1;
}

// --- Connections of gRPC

namespace {

// "127.0.0.1:5000", "::1:5000"; of a unix socket "17", its descriptor. From gRPC's
// "ipv4:127.0.0.1:5000", "ipv6:%5B::1%25eth0%5D:5000", "fd:17".
std::string plain_name(std::string peer) {
  peer.erase(0, peer.find(':') + 1);
  for (const std::string part : {"[", "]", "%5B", "%5D", "::ffff:"}) {
    const size_t at = peer.find(part);
    if (at != std::string::npos) peer.erase(at, part.size());
  }
  const size_t scope = peer.find('%');
  if (scope != std::string::npos) peer.erase(scope, peer.rfind(':') - scope);
  return peer;
}

std::string peer_name(int fd) {
  sockaddr_storage name{};
  socklen_t size = sizeof(name);
  auto* const address = reinterpret_cast<sockaddr*>(&name);
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getpeername(fd, address, &size) != 0 || name.ss_family == AF_UNIX ||
      getnameinfo(address, size, host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return std::to_string(fd);
  }
  return plain_name("ip:" + std::string(host) + ":" + port);
}

// What a TCP connection has received; 0 if the system does not say.
uint64_t bytes_received([[maybe_unused]] int fd) {
#ifdef __linux__
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0) {
    return info.tcpi_bytes_received;
  }
#endif
  return 0;
}

// Closes the connection for its owner, if it is still there.
void cut(int fd, const FileId& file) {
  // From here on the number may become that of another connection.
  const Descriptor own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!is_open(own.get(), file)) return;
  shutdown(own.get(), SHUT_RDWR);
  sockaddr none{};  // resets a TCP connection on Linux; otherwise more would arrive
  none.sa_family = AF_UNSPEC;
  static_cast<void>(connect(own.get(), &none, sizeof(none)));
  // gRPC would still read what has arrived.
  char dropped[1 << 14];
  for (int i = 0; i < 1024; ++i) {
    if (recv(own.get(), dropped, sizeof(dropped), MSG_DONTWAIT) <= 0) break;
  }
}

}  // namespace

template <typename F>
void PeerConnections::for_each_of(const std::string& peer, const F& f) {
  const std::string name = plain_name(peer);
  for (auto& [fd, connection] : connections_) {
    if (connection.peer == name && is_open(fd, connection.file)) f(fd, connection);
  }
}

void PeerConnections::add(int fd) {
  MutexLock lock(mutex_);
  connections_[fd] = {peer_name(fd), file_of(fd)};
}

void PeerConnections::add_dialled() {
#ifdef TCP_USER_TIMEOUT
  std::error_code failure;
  for (const auto& one : std::filesystem::directory_iterator("/dev/fd", failure)) {
    const int fd = std::atoi(one.path().filename().c_str());
    const FileId file = file_of(fd);  // first: another thread may close it
    int timeout = 0;
    socklen_t size = sizeof(timeout);
    getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, &size);
    if (timeout != kPingTimeoutMs) continue;
    const std::string name = peer_name(fd);
    const bool is_connected = name.find(':') != std::string::npos;
    if (!is_connected || !NotInForks::instance().add(fd, file)) continue;
    MutexLock lock(mutex_);
    connections_[fd] = {name, file};
  }
#endif
}

void PeerConnections::count_failure(const std::string& peer) {
  constexpr double kMostFailures = 8;  // one per second is forgiven
  MutexLock lock(mutex_);
  for_each_of(peer, [](int fd, Connection& connection) {
    const auto now = Clock::now();
    const std::chrono::duration<double> time = now - connection.last_failure;
    connection.last_failure = now;
    connection.num_failures = std::max(connection.num_failures - time.count(), 0.0) + 1;
    if (connection.num_failures > kMostFailures) cut(fd, connection.file);
  });
}

void PeerConnections::welcome(const std::string& peer) {
  MutexLock lock(mutex_);
  for_each_of(peer,
              [](int, Connection& connection) { connection.is_stranger = false; });
}

void PeerConnections::drop_strangers(Milliseconds limit, uint64_t most_bytes) {
  MutexLock lock(mutex_);
  for (auto one = connections_.begin(); one != connections_.end();) {
    const auto& [fd, connection] = *one;
    if (connection.is_stranger && (is_longer(Clock::now() - connection.since, limit) ||
                                   bytes_received(fd) > most_bytes)) {
      cut(fd, connection.file);
      one = connections_.erase(one);
    } else {
      ++one;
    }
  }
}

PeerConnections& dialled_connections() {
  static PeerConnections* const connections = new PeerConnections;
  return *connections;
}

void bound_dialled(uint64_t most_bytes) {
  dialled_connections().add_dialled();
  dialled_connections().drop_strangers(kNever, most_bytes);
}

// --- Dialling

int dial_unix(const Address& address, bool anybody) {
  const std::string place = "the socket " + address.to_string();
  Descriptor made = make_socket(AF_UNIX);
  if (made.get() < 0 || call_with(connect, made.get(), address.path()) != 0) {
    throw TransportError("no connection to " + place + ": " + std::strerror(errno));
  }
  uid_t user = 0;
  if (!anybody &&
      (!get_peer_user(made.get(), &user) || (user != geteuid() && user != 0))) {
    throw RefusedError(
        place + " belongs to user " + std::to_string(user) + ", and this is user " +
        std::to_string(geteuid()) +
        ": it may be anybody's. Use a path in a directory that only you can write "
        "to, or, if you trust that user, ask for insecure connections");
  }
  return made.release();
}

}  // namespace torchbeast
