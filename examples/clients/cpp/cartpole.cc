// Cart poles that join a PolyBeast learner, in C++.
//
// Of TorchBeast this uses only the protocol, torchbeast.proto, from which protoc makes
// the namespace torchbeast::wire. CMakeLists.txt explains how to build and run it. To
// use your own simulator, replace CartPole; the rest stays nearly as it is.

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "torchbeast.grpc.pb.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "arrays are little-endian: append() and read_action() must swap bytes here"
#endif

namespace {

namespace wire = torchbeast::wire;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr uint32_t kProtocolVersion = 3;
constexpr Seconds kFirstBackoff(0.1), kLongestBackoff(10);  // before connecting again

// The connection is lost; connecting again may help.
struct Lost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The learner refuses us, or sends an invalid message; connecting again would not help.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  std::string learner;
  int num_envs = 1;
  int episodes = 0;              // 0: no end
  std::optional<uint64_t> seed;  // none: as the learner says
  std::string token_file;
  std::string tls_ca;
  Seconds timeout{120};
  Seconds patience{60};
};

// --- The simulator -------------------------------------------------------------------

// CartPole-v1: a pole on a cart that is pushed left (0) or right (1). The reward is 1
// per step. The episode ends if the cart leaves the track or the pole falls, and is cut
// off after kMaxSteps. Equations: Barto, Sutton and Anderson 1983.
class CartPole {
 public:
  static constexpr int kNumActions = 2;
  static constexpr int kMaxSteps = 500;
  static constexpr double kPi = 3.14159265358979323846;
  static constexpr double kMaxX = 2.4;                     // m
  static constexpr double kMaxAngle = 12 * 2 * kPi / 360;  // rad

  struct Result {
    double reward;
    bool terminated;
    bool truncated;
  };

  // Starts an episode.
  void reset(std::mt19937_64& rng) {
    std::uniform_real_distribution<double> uniform(-0.05, 0.05);
    x_ = uniform(rng);
    x_dot_ = uniform(rng);
    angle_ = uniform(rng);
    angle_dot_ = uniform(rng);
    steps_ = 0;
  }

  Result step(int64_t action) {
    constexpr double kGravity = 9.8;                    // m/s²
    constexpr double kCartMass = 1.0, kPoleMass = 0.1;  // kg
    constexpr double kHalfLength = 0.5;                 // m, of the pole
    constexpr double kForce = 10.0;                     // N
    constexpr double kSeconds = 0.02;                   // per step
    constexpr double kMass = kCartMass + kPoleMass;
    const double force = action == 1 ? kForce : -kForce;
    const double cos = std::cos(angle_), sin = std::sin(angle_);
    const double push =
        (force + kPoleMass * kHalfLength * angle_dot_ * angle_dot_ * sin) / kMass;
    const double angle_acceleration =
        (kGravity * sin - cos * push) /
        (kHalfLength * (4.0 / 3.0 - kPoleMass * cos * cos / kMass));
    const double acceleration =
        push - kPoleMass * kHalfLength * angle_acceleration * cos / kMass;
    x_ += kSeconds * x_dot_;
    x_dot_ += kSeconds * acceleration;
    angle_ += kSeconds * angle_dot_;
    angle_dot_ += kSeconds * angle_acceleration;
    ++steps_;
    const bool terminated = std::abs(x_) > kMaxX || std::abs(angle_) > kMaxAngle;
    return {1.0, terminated, steps_ >= kMaxSteps && !terminated};
  }

  void append_observation(std::vector<float>* values) const {
    for (double value : {x_, x_dot_, angle_, angle_dot_}) {
      values->push_back(static_cast<float>(value));
    }
  }

 private:
  double x_ = 0, x_dot_ = 0, angle_ = 0, angle_dot_ = 0;
  int steps_ = 0;
};

// --- The messages --------------------------------------------------------------------

// Appends the array's bytes to a field.
template <typename T>
void append(const std::vector<T>& array, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(array.data()), array.size() * sizeof(T));
}

// E cart poles in lockstep, the environments of one stream.
class CartPoles {
 public:
  explicit CartPoles(int num_envs)
      : rng_(std::random_device()()),
        envs_(num_envs),
        episode_step_(num_envs),
        episode_return_(num_envs) {}

  // From --seed, or from the numbers of the learner, which no other stream has.
  void seed(const std::optional<uint64_t>& seed, const wire::AgentHello& learner) {
    if (seed) {
      rng_.seed(*seed);
    } else if (learner.has_seeding()) {
      const uint64_t numbers[] = {learner.seeding().seed(), learner.seeding().stream()};
      std::vector<uint32_t> words;
      for (uint64_t number : numbers) {
        words.push_back(static_cast<uint32_t>(number));
        words.push_back(static_cast<uint32_t>(number >> 32));
      }
      std::seed_seq sequence(words.begin(), words.end());
      rng_.seed(sequence);
    }
  }

  wire::EnvHello hello() const {
    wire::EnvHello hello;
    hello.set_version(kProtocolVersion);
    hello.set_environment("CartPole-v1");
    hello.set_num_envs(static_cast<uint32_t>(envs_.size()));
    wire::Space::Box* box = hello.mutable_observation_space()->mutable_box();
    box->set_dtype(wire::FLOAT32);
    box->add_shape(4);
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    for (float bound : {static_cast<float>(2 * CartPole::kMaxX), kInfinity,
                        static_cast<float>(2 * CartPole::kMaxAngle), kInfinity}) {
      box->add_low(-bound);
      box->add_high(bound);
    }
    hello.mutable_action_space()->mutable_discrete()->set_n(CartPole::kNumActions);
    // Besides the fields of every step; README.md lists those that the learner reads.
    for (const auto& [name, dtype] :
         {std::pair("last_action", wire::INT64), std::pair("truncated", wire::BOOL)}) {
      wire::Field* field = hello.add_extra_fields();
      field->set_name(name);
      field->set_dtype(dtype);
    }
    return hello;
  }

  // New episodes. No action has led here, so all else is zero.
  wire::EnvStep first_step() {
    Rows rows(envs_.size());
    for (CartPole& env : envs_) {
      env.reset(rng_);
      env.append_observation(&rows.observations);
    }
    std::fill(rows.done.begin(), rows.done.end(), true);
    return make_step(rows);
  }

  wire::EnvStep step(const std::vector<int64_t>& actions) {
    const Clock::time_point started = Clock::now();
    Rows rows(envs_.size());
    rows.actions = actions;
    for (size_t e = 0; e < envs_.size(); ++e) {
      const CartPole::Result result = envs_[e].step(actions[e]);
      ++episode_step_[e];
      episode_return_[e] += static_cast<float>(result.reward);
      rows.rewards[e] = static_cast<float>(result.reward);
      rows.truncated[e] = result.truncated;
      rows.done[e] = result.terminated || result.truncated;
      envs_[e].append_observation(&rows.final_observations);
      // The last row of an episode has the first observation of the next.
      if (rows.done[e]) envs_[e].reset(rng_);
      envs_[e].append_observation(&rows.observations);
    }
    wire::EnvStep step = make_step(rows);
    for (size_t e = 0; e < envs_.size(); ++e) {
      if (!rows.done[e]) continue;
      episode_step_[e] = 0;
      episode_return_[e] = 0;
    }
    step.set_env_nanoseconds(static_cast<uint64_t>(
        std::chrono::nanoseconds(Clock::now() - started).count()));
    return step;
  }

  // Whether each row of the newest step is the first of an episode.
  bool all_done() const { return all_done_; }

  // Checks the message: do not trust the learner more than necessary.
  std::vector<int64_t> read_action(const wire::AgentAction& action) const {
    const size_t E = envs_.size();
    if (action.arrays().size() != E * sizeof(int64_t)) {
      throw Refused("an action of " + std::to_string(action.arrays().size()) +
                    " bytes instead of INT64 [" + std::to_string(E) + "]");
    }
    std::vector<int64_t> actions(E);
    std::memcpy(actions.data(), action.arrays().data(), action.arrays().size());
    for (int64_t a : actions) {
      if (a < 0 || a >= CartPole::kNumActions) {
        throw Refused("action " + std::to_string(a) + "; allowed are 0 to " +
                      std::to_string(CartPole::kNumActions - 1));
      }
    }
    return actions;
  }

 private:
  struct Rows {
    explicit Rows(size_t E) : rewards(E), done(E), truncated(E), actions(E) {}
    std::vector<float> observations, final_observations, rewards;
    std::vector<uint8_t> done, truncated;
    std::vector<int64_t> actions;
  };

  wire::EnvStep make_step(const Rows& rows) {
    const auto is_true = [](uint8_t x) { return x != 0; };
    all_done_ = std::all_of(rows.done.begin(), rows.done.end(), is_true);
    wire::EnvStep step;
    std::string* arrays = step.mutable_arrays();
    append(rows.observations, arrays);
    append(rows.rewards, arrays);
    append(rows.done, arrays);
    append(episode_step_, arrays);
    append(episode_return_, arrays);
    // The extra fields, in the order of the hello.
    append(rows.actions, arrays);
    append(rows.truncated, arrays);
    if (std::any_of(rows.truncated.begin(), rows.truncated.end(), is_true)) {
      append(rows.final_observations, step.mutable_final_observation());
    }
    return step;
  }

  std::mt19937_64 rng_;
  std::vector<CartPole> envs_;
  std::vector<int64_t> episode_step_;
  std::vector<float> episode_return_;
  bool all_done_ = true;
};

// --- The connection ------------------------------------------------------------------

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::shared_ptr<grpc::Channel> make_channel(const Options& options) {
  grpc::ChannelArguments arguments;
  // Detects a dead network. The learner allows a ping every 5 s.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 15000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // run() waits before it connects again; gRPC need not wait as well.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  if (options.tls_ca.empty()) {
    credentials = grpc::InsecureChannelCredentials();
  } else {
    grpc::SslCredentialsOptions ssl;
    ssl.pem_root_certs = read_file(options.tls_ca);
    credentials = grpc::SslCredentials(ssl);
  }
  return grpc::CreateCustomChannel(options.learner, credentials, arguments);
}

// One call of Join. Its methods return when they are done or at the deadline.
class Call {
 public:
  explicit Call(const Options& options)
      : timeout_(options.timeout),
        stub_(wire::Learner::NewStub(make_channel(options))) {
    if (!options.token_file.empty()) {
      std::istringstream token(read_file(options.token_file));
      std::string word;
      token >> word;
      context_.AddMetadata("authorization", "Bearer " + word);
    }
    stream_ = stub_->PrepareAsyncJoin(&context_, &queue_);
    stream_->StartCall(this);
    wait();  // if this fails, the first read fails too
  }

  ~Call() {
    if (!finished_) {
      context_.TryCancel();
      finish();
    }
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  // These two return false at the end of the stream; finish() returns the reason.
  bool read(wire::AgentMessage* message) {
    stream_->Read(message, this);
    return wait();
  }
  bool write(const wire::EnvMessage& message) {
    stream_->Write(message, this);
    return wait();
  }

  // Ends this side and waits until the learner has read everything.
  void leave() {
    stream_->WritesDone(this);
    wait();
    wire::AgentMessage message;
    while (read(&message)) {  // an action that is no longer needed
    }
  }

  // Waits for the learner's status.
  grpc::Status finish() {
    grpc::Status status;
    stream_->Finish(&status, this);
    wait();
    finished_ = true;
    return status;
  }

  bool timed_out() const { return timed_out_; }

 private:
  // Waits for the operation in progress.
  bool wait() {
    void* tag;
    bool ok = false;
    const auto deadline =
        std::chrono::system_clock::now() +
        std::chrono::duration_cast<std::chrono::milliseconds>(timeout_);
    if (queue_.AsyncNext(&tag, &ok, deadline) == grpc::CompletionQueue::TIMEOUT) {
      timed_out_ = true;
      context_.TryCancel();
      queue_.Next(&tag, &ok);
    }
    return ok;
  }

  const Seconds timeout_;
  const std::unique_ptr<wire::Learner::Stub> stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<wire::EnvMessage, wire::AgentMessage>>
      stream_;
  bool timed_out_ = false;
  bool finished_ = false;
};

// The state that outlives a connection: the environments and their newest step.
class Simulator {
 public:
  explicit Simulator(const Options& options)
      : options_(options), envs_(options.num_envs), episodes_left_(options.episodes) {
    std::random_device random;
    for (int i = 0; i < 16; ++i) stream_id_ += static_cast<char>(random());
  }

  // Connects and steps until this side leaves or the learner ends the stream. Throws
  // Lost or Refused.
  void play() {
    met_learner_ = false;
    Call call(options_);
    converse(&call);
    const grpc::Status status = call.finish();
    if (status.ok()) return;
    if (call.timed_out()) throw Lost("no answer within --timeout");
    const std::string text =
        "status " + std::to_string(status.error_code()) + ": " + status.error_message();
    switch (status.error_code()) {
      case grpc::StatusCode::UNAUTHENTICATED:      // the token
      case grpc::StatusCode::FAILED_PRECONDITION:  // the version, or other spaces
      case grpc::StatusCode::INVALID_ARGUMENT:     // our message breaks a rule
      case grpc::StatusCode::UNIMPLEMENTED:        // not a learner that listens
        throw Refused(text);
      default:
        throw Lost(text);
    }
  }

  uint64_t number() const { return number_; }
  // Whether the newest connection has received the learner's hello.
  bool met_learner() const { return met_learner_; }

 private:
  void converse(Call* call) {
    wire::AgentMessage message;
    if (!call->read(&message)) return;
    if (!message.has_hello()) {
      throw Refused("the learner's first message is not a hello");
    }
    if (message.hello().version() != kProtocolVersion) {
      throw Refused(
          "the learner speaks version " + std::to_string(message.hello().version()) +
          " of the protocol, this program version " + std::to_string(kProtocolVersion));
    }
    met_learner_ = true;
    if (!newest_.has_step()) {
      envs_.seed(options_.seed, message.hello());
      *newest_.mutable_step() = envs_.first_step();
    }
    wire::EnvMessage hello;
    *hello.mutable_hello() = envs_.hello();
    hello.mutable_hello()->set_stream_id(stream_id_);
    hello.mutable_hello()->set_first_step(number_);
    if (!call->write(hello)) return;
    uint64_t last = 0;  // the number of this connection's last action
    // After a lost connection, the newest step and its action are sent again.
    while (call->write(newest_)) {
      if (options_.episodes > 0 && episodes_left_ == 0) {
        call->leave();
        return;
      }
      if (!call->read(&message)) return;
      if (!message.has_action()) {
        throw Refused("the learner sent a message that is not an action");
      }
      const std::vector<int64_t> actions = envs_.read_action(message.action());
      const uint64_t number = message.action().number();
      if (number == 0 || (last != 0 && number != last + 1)) {
        throw Refused("action " + std::to_string(number) + " after action " +
                      std::to_string(last));
      }
      last = number;
      try {
        advance(actions);
        newest_.mutable_step()->set_action_number(number);  // it answers this action
      } catch (const std::exception& error) {
        wire::EnvMessage last;
        last.mutable_error()->set_message(error.what());
        if (call->write(last)) call->leave();
        throw;
      }
    }
  }

  void advance(const std::vector<int64_t>& actions) {
    *newest_.mutable_step() = envs_.step(actions);
    ++number_;
    if (envs_.all_done()) --episodes_left_;
  }

  const Options options_;
  CartPoles envs_;
  std::string stream_id_;
  uint64_t number_ = 0;      // of the newest step
  wire::EnvMessage newest_;  // kept until its action has arrived
  int episodes_left_;        // used if options_.episodes > 0
  bool met_learner_ = false;
};

// --- Command line --------------------------------------------------------------------

constexpr char kUsage[] =
    "usage: cartpole HOST:PORT|unix:PATH [flags]\n"
    "  --num_envs N       cart poles in lockstep (1)\n"
    "  --episodes N       leave after N episodes; needs --num_envs 1\n"
    "  --seed N           of all games (as the learner says)\n"
    "  --token_file FILE  file with the learner's secret\n"
    "  --tls_ca FILE      PEM certificate of the authority that signed the learner's\n"
    "  --timeout S        seconds to wait for an answer (120)\n"
    "  --patience S       give up after S seconds without a learner (60)\n";

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag.compare(0, 2, "--") != 0) {
      options.learner = flag;
      continue;
    }
    if (++i == argc) throw std::invalid_argument(flag + " needs a value");
    const std::string value = argv[i];
    if (flag == "--num_envs") {
      options.num_envs = std::stoi(value);
    } else if (flag == "--episodes") {
      options.episodes = std::stoi(value);
      if (options.episodes < 1) throw std::invalid_argument("--episodes is below 1");
    } else if (flag == "--seed") {
      options.seed = std::stoull(value);
    } else if (flag == "--token_file") {
      options.token_file = value;
    } else if (flag == "--tls_ca") {
      options.tls_ca = value;
    } else if (flag == "--timeout") {
      options.timeout = Seconds(std::stod(value));
    } else if (flag == "--patience") {
      options.patience = Seconds(std::stod(value));
    } else {
      throw std::invalid_argument("unknown flag " + flag);
    }
  }
  if (options.learner.empty()) throw std::invalid_argument("the learner is missing");
  if (options.num_envs < 1) throw std::invalid_argument("--num_envs is below 1");
  if (options.episodes > 0 && options.num_envs != 1) {
    throw std::invalid_argument(
        "--episodes needs --num_envs 1: a client can leave only when all its "
        "environments have just ended an episode");
  }
  return options;
}

// Returns the exit status: 0 if it left or the learner ended the stream, 1 if it was
// refused or found no learner.
int run(const Options& options) {
  Simulator simulator(options);
  std::mt19937 jitter{std::random_device()()};
  Seconds backoff = kFirstBackoff;
  Clock::time_point down_since = Clock::now();
  uint64_t number = 0;
  while (true) {
    try {
      simulator.play();
      break;
    } catch (const Refused& error) {
      std::cerr << "Refused by " << options.learner << ": " << error.what() << "\n";
      return 1;
    } catch (const Lost& error) {
      if (simulator.met_learner()) down_since = Clock::now();
      if (simulator.number() > number) {  // the connection had worked
        backoff = kFirstBackoff;
        number = simulator.number();
      }
      if (Clock::now() - down_since > options.patience) {
        std::cerr << "No learner for " << options.patience.count()
                  << " s: " << error.what() << std::endl;
        return 1;
      }
      std::cerr << error.what() << "; connecting again in about " << backoff.count()
                << " s." << std::endl;
      std::uniform_real_distribution<double> factor(0.5, 1);
      std::this_thread::sleep_for(backoff * factor(jitter));
      backoff = std::min(2 * backoff, kLongestBackoff);
    }
  }
  std::cerr << "The stream has ended after " << simulator.number() << " steps.\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  try {
    options = parse(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "cartpole: " << error.what() << "\n" << kUsage;
    return 2;
  }
  try {
    return run(options);
  } catch (const std::exception& error) {
    std::cerr << "cartpole: " << error.what() << std::endl;
    return 1;
  }
}
