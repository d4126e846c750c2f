// How fast a gRPC stream carries steps when nothing else is done: the bound for
// benchmarks/transport.py, which runs it.
//
//   bare_stream ADDRESS STREAMS BYTES ACTION_BYTES SECONDS
//
// One process serves, this one has STREAMS threads; each sends ACTION_BYTES, gets
// BYTES, and so on. The messages are bytes without meaning; each side copies them once.
// Prints JSON: round trips, seconds and CPU seconds of this side in a window after a
// warm-up, and all round trips and CPU seconds of the other side.

#include <grpcpp/create_channel.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "array.h"
#include "transport.h"

namespace torchbeast {
namespace {

using Seconds = std::chrono::duration<double>;

grpc::ByteBuffer make_message(const std::vector<uint8_t>& bytes, MemoryPool& pool) {
  Array block =
      pool.allocate({DType::kUint8, Shape{static_cast<int64_t>(bytes.size())}});
  std::memcpy(block.data(), bytes.data(), bytes.size());
  auto* owner = new std::shared_ptr<void>(block.owner());
  const grpc::Slice slice(
      block.data(), bytes.size(),
      [](void* owner) { delete static_cast<std::shared_ptr<void>*>(owner); }, owner);
  return grpc::ByteBuffer(&slice, 1);
}

void read_message(const grpc::ByteBuffer& message, std::vector<uint8_t>* bytes) {
  std::vector<grpc::Slice> slices;
  message.Dump(&slices);
  size_t offset = 0;
  for (const grpc::Slice& slice : slices) {
    const size_t size = std::min(slice.size(), bytes->size() - offset);
    std::memcpy(bytes->data() + offset, slice.begin(), size);
    offset += size;
  }
}

double cpu_seconds(const rusage& usage) {
  const auto seconds = [](const timeval& t) { return t.tv_sec + 1e-6 * t.tv_usec; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double own_cpu_seconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return cpu_seconds(usage);
}

int serve(const std::string& address, size_t num_bytes) {
  StreamService service([&](grpc::ServerContext*, ServedStream* stream) {
    MemoryPool pool;
    std::vector<uint8_t> bytes(num_bytes, 7), action(1 << 16);
    grpc::ByteBuffer message;
    while (stream->Read(&message)) {
      read_message(message, &action);
      if (!stream->Write(make_message(bytes, pool))) break;
    }
    return grpc::Status::OK;
  });
  grpc::ServerBuilder builder;
  grpc::ResourceQuota quota;
  set_arguments(Address(address), &quota, &builder);
  Security security;
  security.insecure = true;
  builder.AddListeningPort(address, server_credentials(Address(address), security));
  builder.RegisterService(&service);
  auto server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  server->Wait();  // until the parent ends this process
  return 0;
}

int run(const std::string& address, int num_streams, size_t num_bytes,
        size_t action_bytes, double seconds) {
  const pid_t server = fork();  // before gRPC has threads
  if (server == 0) _exit(serve(address, num_bytes));
  std::atomic<uint64_t> count{0};
  std::atomic<int> num_connected{0};
  std::atomic<bool> running{true}, failed{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < num_streams; ++i) {
    threads.emplace_back([&] {
      auto channel = grpc::CreateCustomChannel(Address(address).to_string(),
                                               grpc::InsecureChannelCredentials(),
                                               channel_arguments(Address(address)));
      if (!channel->WaitForConnected(std::chrono::system_clock::now() +
                                     std::chrono::seconds(10))) {
        failed = true;
        return;
      }
      grpc::ClientContext context;
      auto stream = open_stream(channel.get(), &context);
      MemoryPool pool;
      std::vector<uint8_t> bytes(num_bytes), action(action_bytes, 1);
      grpc::ByteBuffer message;
      ++num_connected;
      while (running) {
        if (!stream->Write(make_message(action, pool)) || !stream->Read(&message)) {
          failed = true;
          return;
        }
        read_message(message, &bytes);
        ++count;
      }
      context.TryCancel();
      stream->Finish();
    });
  }
  while (num_connected < num_streams && !failed) {  // ends: connecting has a deadline
    std::this_thread::sleep_for(Seconds(0.01));
  }
  std::this_thread::sleep_for(Seconds(std::min(1.0, seconds / 2)));  // warm-up
  const uint64_t first = count;
  const double cpu = own_cpu_seconds();
  const auto start = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(Seconds(seconds));
  const double elapsed = Seconds(std::chrono::steady_clock::now() - start).count();
  const uint64_t messages = count - first;
  const double client_cpu = own_cpu_seconds() - cpu;
  running = false;
  for (std::thread& thread : threads) thread.join();
  kill(server, SIGKILL);
  rusage server_usage;
  wait4(server, nullptr, 0, &server_usage);
  if (failed) {
    std::fprintf(stderr, "bare_stream: a stream broke\n");
    return 1;
  }
  std::printf(
      "{\"round_trips\": %llu, \"seconds\": %.6f, \"client_cpu_seconds\": %.6f, "
      "\"all_round_trips\": %llu, \"server_cpu_seconds\": %.6f}\n",
      static_cast<unsigned long long>(messages), elapsed, client_cpu,
      static_cast<unsigned long long>(count.load()), cpu_seconds(server_usage));
  return 0;
}

}  // namespace
}  // namespace torchbeast

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr,
                 "usage: bare_stream ADDRESS STREAMS BYTES ACTION_BYTES SECONDS\n");
    return 2;
  }
  return torchbeast::run(argv[1], std::stoi(argv[2]), std::stoul(argv[3]),
                         std::stoul(argv[4]), std::stod(argv[5]));
}
