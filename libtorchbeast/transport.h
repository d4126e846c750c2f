// Addresses, credentials, and the services of proto/torchbeast.proto.

#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/sync_stream.h>

#include <functional>
#include <memory>
#include <string>

#include "end.h"
#include "text.h"

namespace grpc {
class ChannelCredentials;
class ResourceQuota;
class ServerBuilder;
class ServerCredentials;
}  // namespace grpc

namespace torchbeast {

class Descriptor;

// The other side, or the way to it: no connection, or a lost one. Its text may be a
// peer's, so it is made printable here, as in all errors about peers.
class TransportError : public Ended {
 public:
  explicit TransportError(const std::string& message, End::Kind kind = End::kLost)
      : Ended(kind, printable(message)) {}
};

// One side says no to the other: a wrong token, another version, another user, ...
class RefusedError : public TransportError {
 public:
  explicit RefusedError(const std::string& message)
      : TransportError(message, End::kRefused) {}
};

// "unix:/tmp/polybeast.0" or "host:port", "[::1]:port".
class Address {
 public:
  // Throws std::invalid_argument, which says what is allowed.
  explicit Address(const std::string& text);

  bool is_unix() const { return !path_.empty(); }
  bool is_loopback() const;  // only this machine can connect
  const std::string& path() const { return path_; }
  const std::string& host() const { return host_; }
  int port() const { return port_; }
  std::string to_string() const;  // as gRPC takes it

 private:
  std::string path_;
  std::string host_;
  int port_ = 0;
};

// How one side proves its identity, and what proof it asks of the other.
struct Security {
  // TLS, for host:port. Any of the next four asks for it, too. Contents of PEM files.
  bool tls = false;
  std::string ca;    // certificates that the other side's must be signed by
  std::string cert;  // this side's certificate and its key; a server needs them
  std::string key;
  std::string server_name;  // client: the name in the certificate, if not the host
  std::string token;        // client: sends it; server: refuses all others
  // Allow, beyond this machine, plain TCP, and a server that takes in everybody; and to
  // dial unix sockets of other users.
  bool insecure = false;

  bool uses_tls() const {
    return tls || !(ca.empty() && cert.empty() && key.empty() && server_name.empty());
  }
};

// Throw std::invalid_argument if `security` does not suffice for `address`, or is
// incomplete.
std::shared_ptr<grpc::ChannelCredentials> client_credentials(const Address& address,
                                                             const Security& security);
std::shared_ptr<grpc::ServerCredentials> server_credentials(const Address& address,
                                                            const Security& security);

// Settings of both sides: no compression, the longest message, and over TCP pings that
// notice a cut network within half a minute. The quota bounds the memory of messages
// that are on their way; beyond it gRPC cuts streams. All dialled connections of the
// process share one; a server has its own. gRPC's own sizes of frames and windows are
// as fast as larger ones. Of gRPC's error messages, one of a kind is printed per
// minute, for the whole process: gRPC has one log. GRPC_VERBOSITY=DEBUG leaves it
// alone.
grpc::ChannelArguments channel_arguments(const Address& address);
void set_arguments(const Address& address, grpc::ResourceQuota* quota,
                   grpc::ServerBuilder* builder);
// A way to the server at `address`. Throws std::invalid_argument as client_credentials,
// TransportError if nobody listens at a unix socket, or another user. TCP connects when
// a stream is opened. `socket` gets a second descriptor of a unix socket.
std::shared_ptr<grpc::Channel> make_channel(const Address& address,
                                            const Security& security,
                                            Descriptor* socket);

// --- The services

extern const char kStreamMethod[];  // of EnvServer
extern const char kJoinMethod[];    // of Learner

// The two ends of a stream: the one that connected, and the one that listened. The
// method says which of them is the learner.
using DialledStream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;
using ServedStream = grpc::ServerReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

// Client side: opens one stream. The channel must outlive it.
std::unique_ptr<DialledStream> open_stream(grpc::ChannelInterface* channel,
                                           grpc::ClientContext* context,
                                           const char* method = kStreamMethod);

// Server side: calls `handler` in a thread of its own for each stream. Thread-safe.
class StreamService : public grpc::Service {
 public:
  using Handler = std::function<grpc::Status(grpc::ServerContext*, ServedStream*)>;
  explicit StreamService(Handler handler, const char* method = kStreamMethod);

 private:
  const Handler handler_;
};

}  // namespace torchbeast
