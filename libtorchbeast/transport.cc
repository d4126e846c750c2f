#include "transport.h"

#include <fcntl.h>
#include <grpc/compression.h>
#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/support/method_handler.h>
#include <grpcpp/version_info.h>
#include <sys/un.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <map>
#include <utility>

#if __has_include(<google/protobuf/stubs/logging.h>)
#include <google/protobuf/stubs/logging.h>  // before protobuf 22
#endif

#include "sockets.h"
#include "sync.h"

namespace torchbeast {

const char kStreamMethod[] = "/torchbeast.wire.EnvServer/Stream";
const char kJoinMethod[] = "/torchbeast.wire.Learner/Join";

// --- Addresses

namespace {

[[noreturn]] void bad_address(const std::string& text, const std::string& reason) {
  throw std::invalid_argument("bad address '" + text + "': " + reason +
                              ". Allowed are unix:/path/of/a/socket, host:port and "
                              "[IPv6 address]:port");
}

}  // namespace

Address::Address(const std::string& text) {
  const std::string unix_prefix = "unix:";
  if (text.compare(0, unix_prefix.size(), unix_prefix) == 0) {
    path_ = text.substr(unix_prefix.size());
    // gRPC also writes unix:///path.
    if (path_.compare(0, 3, "///") == 0) path_ = path_.substr(2);
    if (path_.empty()) bad_address(text, "the path is empty");
    if (path_.find('\0') != std::string::npos) bad_address(text, "a zero byte");
    const size_t longest = sizeof(sockaddr_un::sun_path) - 1;
    if (path_.size() > longest) {
      bad_address(text, "the path has " + std::to_string(path_.size()) +
                            " bytes, and the system allows " + std::to_string(longest));
    }
    return;
  }
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) bad_address(text, "no port");
  host_ = text.substr(0, colon);
  const std::string port = text.substr(colon + 1);
  if (host_.size() >= 2 && host_.front() == '[' && host_.back() == ']') {
    host_ = host_.substr(1, host_.size() - 2);
  } else if (host_.find(':') != std::string::npos) {
    bad_address(text, "an IPv6 address needs brackets");
  }
  if (host_.empty()) bad_address(text, "no host");
  for (const char c : host_) {
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '-' &&
        c != ':' && c != '_' && c != '%') {
      bad_address(text, std::string("'") + c + "' in the host");
    }
  }
  if (port.empty() || port.size() > 5 ||
      port.find_first_not_of("0123456789") != std::string::npos ||
      std::stoi(port) > 65535) {
    bad_address(text, "the port is '" + port + "', not a number up to 65535");
  }
  port_ = std::stoi(port);
}

bool Address::is_loopback() const {
  if (is_unix() || host_ == "localhost" || host_ == "::1") return true;
  // Of names only the numeric ones: a name that begins with "127." may lead anywhere.
  return host_.compare(0, 4, "127.") == 0 &&
         host_.find_first_not_of("0123456789.") == std::string::npos;
}

std::string Address::to_string() const {
  if (is_unix()) return "unix:" + path_;
  const bool v6 = host_.find(':') != std::string::npos;
  return (v6 ? "[" + host_ + "]" : host_) + ":" + std::to_string(port_);
}

// --- Credentials

namespace {

void check_security(const Address& address, const Security& security) {
  // It travels in a header; gRPC ends the process over others.
  for (const char c : security.token) {
    if (c <= ' ' || c > '~') {
      throw std::invalid_argument("the token must be printable ASCII without spaces");
    }
  }
  if (address.is_unix()) {
    if (security.uses_tls()) {
      throw std::invalid_argument("TLS is for host:port, and the address is " +
                                  address.to_string());
    }
    return;
  }
  if (!security.uses_tls() && !security.insecure && !address.is_loopback()) {
    throw std::invalid_argument(
        address.to_string() +
        " can be reached from other machines, and the connection would be neither "
        "encrypted nor authenticated. Give TLS certificates, or, in a network that "
        "you trust, ask for insecure connections");
  }
}

}  // namespace

std::shared_ptr<grpc::ChannelCredentials> client_credentials(const Address& address,
                                                             const Security& security) {
  check_security(address, security);
  if (address.is_unix() || !security.uses_tls()) {
    return grpc::InsecureChannelCredentials();
  }
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = security.ca;  // empty: the system's
  options.pem_cert_chain = security.cert;
  options.pem_private_key = security.key;
  return grpc::SslCredentials(options);
}

std::shared_ptr<grpc::ServerCredentials> server_credentials(const Address& address,
                                                            const Security& security) {
  check_security(address, security);
  if (address.is_unix() || !security.uses_tls()) {
    return grpc::InsecureServerCredentials();
  }
  if (security.cert.empty()) {
    throw std::invalid_argument("a TLS server needs a certificate and its key");
  }
  if (security.ca.empty() && security.token.empty() && !security.insecure &&
      !address.is_loopback()) {
    throw std::invalid_argument(
        "anybody who reaches " + address.to_string() +
        " could take part: TLS proves to them who this side is, and they prove "
        "nothing. "
        "Give a token, or the CA that has signed their certificates, or, in a network "
        "that you trust, ask for insecure connections");
  }
  grpc::SslServerCredentialsOptions options(
      security.ca.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                          : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = security.ca;
  options.pem_key_cert_pairs.push_back({security.key, security.cert});
  return grpc::SslServerCredentials(options);
}

// --- Channels

namespace {

constexpr size_t kMaxBytesInFlight = size_t{1} << 30;

constexpr std::pair<const char*, int> kArguments[] = {
    {GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, 256 << 20},
    {GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, 256 << 20},
    {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPingTimeoutMs},
    {GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0},
    {GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000},
    // A compressed megabyte can be a gigabyte. gRPC refuses streams with compression,
    // and never inflates a message.
    {GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE},
    {GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0},
    {GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0},
};

// On a unix socket, nothing can be lost without an end of the connection, and gRPC
// would find no answer to a ping if no thread of this process waits in it.
int ping_interval_ms(const Address& address) {
  return address.is_unix() ? std::numeric_limits<int>::max() /* never */ : 15000;
}

const grpc::ResourceQuota& dialled_quota() {
  static const grpc::ResourceQuota* const shared = [] {
    auto* made = new grpc::ResourceQuota("torchbeast");
    made->Resize(kMaxBytesInFlight);
    return made;  // never destroyed: gRPC may end after it
  }();
  return *shared;
}

// Older versions print a line for each text that is no UTF-8, and peers choose how many
// there are. The message is refused all the same, with its peer. What is said about
// messages of others goes on as before.
void keep_protobuf_quiet() {
#if __has_include(<google/protobuf/stubs/logging.h>)
  namespace pb = google::protobuf;
  static pb::LogHandler* const before = pb::SetLogHandler(nullptr);
  pb::SetLogHandler(
      [](pb::LogLevel level, const char* file, int line, const std::string& text) {
        const bool is_ours = text.find("torchbeast.wire.") != std::string::npos;
        if (!is_ours && before != nullptr) before(level, file, line, text);
      });
#endif
}

// Newer versions of gRPC have no such function; they log through Abseil.
#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR < 64

// gRPC's error messages. A peer can cause thousands, so one of each place in gRPC's
// code is printed per kLogPeriod. Thread-safe.
void print_some(gpr_log_func_args* args) {
  constexpr Milliseconds kLogPeriod{60'000};
  // Never destroyed, as the quota.
  static auto* const mutex = new Mutex;
  static auto* const printed = new std::map<std::string, Clock::time_point>;
  const char* const name = std::strrchr(args->file, '/');
  const std::string place = std::string(name == nullptr ? args->file : name + 1) + ":" +
                            std::to_string(args->line);
  {
    MutexLock lock(*mutex);
    const auto [seen, is_new] = printed->emplace(place, Clock::now());
    if (!is_new && !is_longer(Clock::now() - seen->second, kLogPeriod)) return;
    seen->second = Clock::now();
  }
  std::cerr << "libtorchbeast: gRPC, " + place + ": " +
                   printable(shortened(args->message, 1000)) + "\n"
            << std::flush;
}

void limit_log() {
  static const bool once = [] {
    keep_protobuf_quiet();
    const char* const wanted = std::getenv("GRPC_VERBOSITY");
    const bool is_debug = wanted != nullptr && std::strcmp(wanted, "DEBUG") == 0;
    if (!is_debug) gpr_set_log_function(print_some);
    return true;
  }();
  static_cast<void>(once);
}

#else
void limit_log() { keep_protobuf_quiet(); }
#endif

}  // namespace

grpc::ChannelArguments channel_arguments(const Address& address) {
  limit_log();
  grpc::ChannelArguments arguments;
  for (const auto& [name, value] : kArguments) arguments.SetInt(name, value);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, ping_interval_ms(address));
  arguments.SetResourceQuota(dialled_quota());
  // A connection of its own for each stream; addresses are dialled as they are given.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return arguments;
}

std::shared_ptr<grpc::Channel> make_channel(const Address& address,
                                            const Security& security,
                                            Descriptor* socket) {
  const auto credentials = client_credentials(address, security);
  grpc::ChannelArguments arguments = channel_arguments(address);
  if (address.is_unix()) {
    const int fd = dial_unix(address, security.insecure);
    *socket = Descriptor(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (socket->get() < 0) {  // nobody would notice that the other side has died
      const std::string why = std::strerror(errno);
      ::close(fd);
      throw TransportError("no second descriptor for " + address.to_string() + ": " +
                           why);
    }
    return grpc::CreateCustomInsecureChannelFromFd("localhost", fd, arguments);
  }
  if (!security.server_name.empty()) {
    arguments.SetSslTargetNameOverride(security.server_name);
  }
  return grpc::CreateCustomChannel(address.to_string(), credentials, arguments);
}

void set_arguments(const Address& address, grpc::ResourceQuota* quota,
                   grpc::ServerBuilder* builder) {
  limit_log();
  for (const auto& [name, value] : kArguments) builder->AddChannelArgument(name, value);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, ping_interval_ms(address));
  quota->Resize(kMaxBytesInFlight);
  builder->SetResourceQuota(*quota);
}

// --- The service

// What protoc's gRPC plugin writes for a method of two streams, with the messages left
// as bytes: codec.h reads and writes them in place.

std::unique_ptr<DialledStream> open_stream(grpc::ChannelInterface* channel,
                                           grpc::ClientContext* context,
                                           const char* method) {
  const grpc::internal::RpcMethod rpc(method,
                                      grpc::internal::RpcMethod::BIDI_STREAMING);
  return std::unique_ptr<DialledStream>(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer,
                                                grpc::ByteBuffer>::Create(channel, rpc,
                                                                          context));
}

StreamService::StreamService(Handler handler, const char* method)
    : handler_(std::move(handler)) {
  using Method = grpc::internal::BidiStreamingHandler<StreamService, grpc::ByteBuffer,
                                                      grpc::ByteBuffer>;
  AddMethod(new grpc::internal::RpcServiceMethod(
      method, grpc::internal::RpcMethod::BIDI_STREAMING,
      new Method(
          [](StreamService* service, grpc::ServerContext* context,
             ServedStream* stream) { return service->handler_(context, stream); },
          this)));
}

}  // namespace torchbeast
