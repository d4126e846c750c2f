// libFuzzer target of the codec and of the hello's rules: a message is refused with a
// WireError, or it holds what protobuf's generated classes read in it. A step or action
// of the right sizes that these classes have written is not refused.
//
// The first byte of the input chooses the message (see Kind), the second the size of
// the chunks that the rest, the message, is delivered in; 0: one chunk.
//
// For a lane, the rest is what the other side does, see check_lane(): it lies about its
// memory, sends messages and writes anywhere, also while this side reads.
//
//   clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined ... fuzz_wire.cc
//   ./fuzz_wire tests/cpp/corpus

#include <google/protobuf/message.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/unknown_field_set.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "codec.h"
#include "connection.h"
#include "messages.h"
#include "shared_lane.h"

namespace torchbeast {
namespace {

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

enum Kind : uint8_t {
  kEnvHello = 0,
  kAgentHello = 1,
  kStep = 2,
  kAction = 3,
  kLearnersLane = 4,
  kEnvironmentsLane = 5,
  kKinds
};

// E = 2; uint8 [3], bool [], float32 [0] are observed, and int64 [] is the action.
wire::EnvHello make_hello() {
  wire::EnvHello hello;
  hello.set_version(kWireVersion);
  hello.set_num_envs(2);
  auto* spaces = hello.mutable_observation_space()->mutable_tuple();
  const auto add = [&](wire::DType dtype) {
    spaces->add_items()->mutable_box()->set_dtype(dtype);
    return spaces->mutable_items(spaces->items_size() - 1)->mutable_box();
  };
  add(wire::UINT8)->add_shape(3);
  add(wire::BOOL);
  add(wire::FLOAT32)->add_shape(0);
  hello.mutable_action_space()->mutable_discrete()->set_n(7);
  wire::Field* field = hello.add_extra_fields();
  field->set_name("truncated");
  field->set_dtype(wire::BOOL);
  return hello;
}

const StreamSpec& spec() {
  static const StreamSpec spec(make_hello());
  return spec;
}

// Memory of its exact size, so that AddressSanitizer sees a byte too many. (Blocks of a
// pool are larger than their arrays.)
std::vector<Array> exact(const std::vector<ArraySpec>& specs) {
  std::vector<Array> arrays;
  for (const ArraySpec& spec : specs) {
    const auto data = std::make_shared<std::vector<uint8_t>>(spec.num_bytes());
    arrays.emplace_back(spec, data->data(), data);
  }
  return arrays;
}

// Whether `bytes` are good for arrays of these specs.
bool fits(const std::string& bytes, const std::vector<ArraySpec>& specs) {
  size_t i = 0;
  for (const ArraySpec& spec : specs) {
    const std::string own = bytes.substr(std::min(i, bytes.size()), spec.num_bytes());
    const auto is_bool = [](char c) { return c == 0 || c == 1; };
    if (spec.dtype == DType::kBool && !std::all_of(own.begin(), own.end(), is_bool)) {
      return false;
    }
    i += spec.num_bytes();
  }
  return i == bytes.size();
}

// What a generated class reads; nothing if it can't.
template <typename Message>
std::optional<Message> parse(const std::string& bytes) {
  Message message;
  if (!message.ParseFromString(bytes)) return std::nullopt;
  return message;
}

bool has_known_fields(const google::protobuf::Message& message) {
  return message.GetReflection()->GetUnknownFields(message).empty();
}

void check_limits(const StreamSpec& spec) {
  CHECK(spec.num_envs >= 1 && spec.num_envs <= kMaxEnvs);
  CHECK(spec.num_observation_arrays >= 1);
  CHECK(spec.num_observation_arrays == spec.observation.num_leaves());
  CHECK(spec.arrays.size() >= spec.num_observation_arrays + kStandardFields);
  CHECK(spec.arrays.size() <= static_cast<size_t>(kMaxArrays));
  CHECK(spec.names.size() == spec.arrays.size());
  CHECK(spec.rules.size() == spec.arrays.size());
  CHECK(spec.action.empty() == !spec.has_action_space);
  size_t bytes = 0;
  for (size_t i = 0; i < spec.arrays.size(); ++i) {
    const ArraySpec& array = spec.arrays[i];
    CHECK(array.shape.size() >= 1 && array.shape.size() <= kMaxSpaceDims + 1);
    CHECK(array.shape[0] == spec.num_envs);
    bytes += array.num_bytes();
    const ValueRule& rule = spec.rules[i];
    CHECK(rule.low.size() == rule.high.size());
    CHECK(rule.low.size() <= 1 ||
          rule.low.size() * static_cast<size_t>(spec.num_envs) == array.num_elements());
    for (size_t k = 0; k < rule.low.size(); ++k) CHECK(rule.low[k] <= rule.high[k]);
  }
  CHECK(bytes <= static_cast<size_t>(kMaxMessageBytes));
}

// The buffer has the message. If its bytes change while it is read, then what was read
// is good, or is refused.
void check_step(const std::string& message, grpc::ByteBuffer buffer) {
  const auto oracle = parse<wire::EnvMessage>(message);
  const bool is_canonical =
      oracle && oracle->has_step() && oracle->SerializeAsString() == message &&
      has_known_fields(*oracle) && has_known_fields(oracle->step());
  const std::string& final_bytes =
      is_canonical ? oracle->step().final_observation() : std::string();
  const bool must_fit =
      is_canonical && fits(oracle->step().arrays(), spec().arrays) &&
      (final_bytes.empty() || fits(final_bytes, spec().observation.flatten()));
  EnvRow row;
  row.arrays = exact(spec().arrays);
  std::optional<std::string> error;
  try {
    error = decode_step(&buffer, spec(), pool(), &row);
  } catch (const WireError&) {
    CHECK(!must_fit || bytes_of(buffer) != message);
    throw;
  }
  CHECK(error || fits(content(row.arrays), spec().arrays));
  CHECK(row.final_observation.empty() ||
        fits(content(row.final_observation), spec().observation.flatten()));
  if (bytes_of(buffer) != message) return;
  if (error) {
    CHECK(oracle && oracle->has_error() && oracle->error().message() == *error);
    const auto again = parse<wire::EnvMessage>(bytes_of(encode_error(*error)));
    // A long text is cut.
    CHECK(again && (again->error().message() == *error || error->size() > 60000));
    return;
  }
  wire::EnvMessage equal;
  equal.mutable_step()->set_arrays(content(row.arrays));
  equal.mutable_step()->set_final_observation(content(row.final_observation));
  equal.mutable_step()->set_env_nanoseconds(row.env_nanoseconds);
  equal.mutable_step()->set_action_number(row.action_number);
  CHECK(bytes_of(encode_step(row, pool())) == equal.SerializeAsString());
  if (!oracle) return;  // generated classes take fewer forms of a length
  CHECK(oracle->step().arrays() == equal.step().arrays());
  CHECK(oracle->step().final_observation() == equal.step().final_observation());
  CHECK(oracle->step().env_nanoseconds() == row.env_nanoseconds);
  CHECK(oracle->step().action_number() == row.action_number);
}

void check_action(const std::string& message, grpc::ByteBuffer buffer) {
  const auto oracle = parse<wire::AgentMessage>(message);
  const bool must_fit =
      oracle && oracle->has_action() && oracle->SerializeAsString() == message &&
      has_known_fields(*oracle) && has_known_fields(oracle->action()) &&
      fits(oracle->action().arrays(), spec().action.flatten());
  const std::vector<Array> action = exact(spec().action.flatten());
  uint64_t number = 0;
  try {
    number = decode_action(&buffer, action);
  } catch (const WireError&) {
    CHECK(!must_fit || bytes_of(buffer) != message);
    throw;
  }
  if (bytes_of(buffer) != message) return;
  wire::AgentMessage equal;
  equal.mutable_action()->set_arrays(content(action));
  equal.mutable_action()->set_number(number);
  CHECK(bytes_of(encode_action(action, number, pool())) == equal.SerializeAsString());
  CHECK(!oracle || oracle->action().arrays() == equal.action().arrays());
}

void check_env_hello(grpc::ByteBuffer buffer) {
  const wire::EnvMessage decoded = decode_env_message(&buffer);
  if (!decoded.has_hello()) return;
  check_limits(StreamSpec(decoded.hello()));
  CHECK(decoded.hello().stream_id().size() <= kMaxStreamIdBytes);
  grpc::ByteBuffer again = encode(decoded);
  CHECK(decode_env_message(&again).SerializeAsString() == decoded.SerializeAsString());
}

void check_agent_hello(grpc::ByteBuffer buffer) {
  const wire::AgentMessage decoded = decode_agent_message(&buffer);
  grpc::ByteBuffer again = encode(decoded);
  CHECK(decode_agent_message(&again).SerializeAsString() ==
        decoded.SerializeAsString());
}

// --- Lanes

// The bytes of an input, one after the other. Zeros follow them.
class Input {
 public:
  explicit Input(std::string bytes) : bytes_(std::move(bytes)) {}
  bool is_empty() const { return i_ >= bytes_.size(); }
  uint8_t byte() { return is_empty() ? 0 : static_cast<uint8_t>(bytes_[i_++]); }
  size_t number() { return byte() + (size_t{byte()} << 8); }
  std::string text(size_t size) {
    const std::string text = bytes_.substr(std::min(i_, bytes_.size()), size);
    i_ += size;
    return text;
  }

 private:
  const std::string bytes_;
  size_t i_ = 0;
};

// What the other side writes into the memory, before the code under test reads from any
// memory for the num_loads-th time from now.
struct Scribble {
  ~Scribble() { num_loads = 0; }
  static void apply() { std::memcpy(to, bytes.data(), bytes.size()); }
  static inline int num_loads = 0;  // 0: it is done
  static inline uint8_t* to = nullptr;
  static inline std::string bytes;
};

// One side of a stream. The other side answers what was sent last, until it hangs up.
// Whenever it is asked for, it is gone: so nothing waits here.
class OneSide : public Connection {
 public:
  using Answer = std::function<std::string(const std::string& sent)>;
  explicit OneSide(Answer answer)
      : Connection("the fuzzer", "unix:"), answer_(std::move(answer)) {}
  void hang_up() { answer_ = nullptr; }

 private:
  bool is_gone() const override { return true; }
  bool do_write(const grpc::ByteBuffer& message) override {
    sent_ = bytes_of(message);
    return true;
  }
  bool do_read(grpc::ByteBuffer* message) override {
    if (answer_) *message = buffer_of(answer_(sent_));
    return answer_ != nullptr;
  }
  void do_cancel() override {}
  [[noreturn]] void throw_reason(bool reading) override {
    CHECK(reading);  // there is room for all that this side writes
    throw Ended(End::kLeft, "the fuzzer has left");
  }

  Answer answer_;
  std::string sent_;
};

// Whether the input makes something else of what a peer says about its memory.
bool lie(Input& input, wire::SharedMemory* memory) {
  const int what = input.byte() % 4;
  const uint32_t value = input.byte();
  std::string& nonce = *memory->mutable_nonce();
  if (what == 0) memory->set_process(memory->process() ^ value << 23);  // there is none
  if (what == 1) memory->set_file(memory->file() ^ value);
  if (what == 2) nonce[value % nonce.size()] ^= static_cast<char>(value);
  if (what == 3) nonce.resize(value % nonce.size());
  return what == 3 || value != 0;
}

// The input says what the other side does, and when this side reads and writes.
void check_lane(const std::string& program, bool is_learner) {
  Input input(program);
  std::unique_ptr<SharedLane> peer;
  std::unique_ptr<SharedPages> pages;  // as the peer sees them
  bool has_lied = false;
  const auto open_pages = [&](const wire::SharedMemory& memory) {
    const std::string file = "/proc/self/fd/" + std::to_string(memory.file());
    pages = SharedPages::open(memory, std::filesystem::file_size(file) - kLine);
  };
  OneSide side([&](const std::string& sent) {
    if (is_learner) {
      const wire::AgentMessage hello = *parse<wire::AgentMessage>(sent);
      wire::EnvMessage answer;
      *answer.mutable_hello() = make_hello();
      wire::SharedMemory& memory = *answer.mutable_hello()->mutable_shared_memory();
      peer = SharedLane::make(spec(), hello.hello().doorbell());
      memory = peer->description();
      open_pages(memory);
      has_lied = lie(input, &memory);
      return answer.SerializeAsString();
    }
    wire::AgentMessage answer;
    if (sent.empty()) {
      answer.mutable_hello()->set_version(kWireVersion);
      wire::SharedMemory& memory = *answer.mutable_hello()->mutable_doorbell();
      memory = doorbell_pages()->description();
      has_lied = lie(input, &memory);
    } else {
      const wire::EnvMessage hello = *parse<wire::EnvMessage>(sent);
      peer = SharedLane::open(spec(), hello.hello().shared_memory());
      open_pages(hello.hello().shared_memory());
      answer.set_shared_memory(true);
    }
    return answer.SerializeAsString();
  });
  if (is_learner) {
    side.shake_hands(std::nullopt, true);
  } else {
    side.expect_agent_hello();
    side.introduce(make_hello());
  }
  CHECK(side.has_lane() != has_lied);
  if (has_lied) return;
  side.hang_up();

  const Scribble scribble;
  for (int i = 0; i < 64 && !input.is_empty(); ++i) {
    switch (input.byte() % 4) {
      case 0: {  // into what is before the messages, or into their beginnings
        Scribble::to = pages->data() + 4 * input.byte();
        Scribble::bytes = input.text(input.byte() % 32);
        Scribble::num_loads = static_cast<int>(input.number() % 512);
        if (Scribble::num_loads == 0) Scribble::apply();
        break;
      }
      case 1:
        peer->write(buffer_of(input.text(input.number() % 1024)));
        break;
      case 2: {
        const bool has_message = side.has_message();
        grpc::ByteBuffer message;
        try {
          side.read(&message);
          (is_learner ? check_step : check_action)(bytes_of(message), message);
        } catch (const Ended& ended) {
          CHECK(ended.kind == End::kLeft || ended.kind == End::kBrokeRules);
          // A collector would have waited.
          CHECK(ended.kind != End::kLeft || !has_message);
        }
        break;
      }
      case 3: {
        EnvRow row;
        row.arrays = exact(is_learner ? spec().action.flatten() : spec().arrays);
        side.write(is_learner ? action_message(row.arrays, 0) : step_message(row),
                   pool());
        break;
      }
    }
  }
}

}  // namespace
}  // namespace torchbeast

// Called before the code under test reads 1, 2, 4, 8 or 16 bytes.
#define TB_ON_LOAD(size)                                                          \
  extern "C" void __sanitizer_cov_load##size(const void*) {                       \
    using torchbeast::Scribble;                                                   \
    if (Scribble::num_loads > 0 && --Scribble::num_loads == 0) Scribble::apply(); \
  }
TB_ON_LOAD(1)
TB_ON_LOAD(2)
TB_ON_LOAD(4)
TB_ON_LOAD(8)
TB_ON_LOAD(16)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torchbeast;
  // Protobuf would write a line for each text that is not UTF-8.
  [[maybe_unused]] static const auto silent = google::protobuf::SetLogHandler(nullptr);
  if (size < 2) return 0;
  const size_t chunk = data[1] == 0 ? 1 << 20 : data[1];
  const std::string message(reinterpret_cast<const char*>(data + 2), size - 2);
  const auto buffer = [&] { return buffer_of(message, chunk); };
  const uint8_t kind = data[0] % kKinds;
  try {
    if (kind == kEnvHello) check_env_hello(buffer());
    if (kind == kAgentHello) check_agent_hello(buffer());
    if (kind == kStep) check_step(message, buffer());
    if (kind == kAction) check_action(message, buffer());
    if (kind >= kLearnersLane) check_lane(message, kind == kLearnersLane);
  } catch (const WireError& error) {
    // Texts end up in logs and in the status of a call.
    CHECK(std::strlen(error.what()) < 4096);
  }
  return 0;
}
