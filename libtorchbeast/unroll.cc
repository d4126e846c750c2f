#include "unroll.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace torchbeast {

namespace {

// Adds the time from construction to destruction.
class WaitTimer {
 public:
  explicit WaitTimer(std::atomic<uint64_t>* total)
      : total_(total), start_(Clock::now()) {}
  ~WaitTimer() {
    *total_ +=
        static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - start_).count());
  }

 private:
  std::atomic<uint64_t>* const total_;
  const Clock::time_point start_;
};

bool all(const Array& bools) {
  return std::all_of(bools.data(), bools.data() + bools.num_bytes(),
                     [](uint8_t value) { return value != 0; });
}

bool any(const Array& bools) {
  return std::any_of(bools.data(), bools.data() + bools.num_bytes(),
                     [](uint8_t value) { return value != 0; });
}

// Of a row's arrays; null if there is no such field.
const Array* truncated(const StreamSpec& spec, const std::vector<Array>& arrays) {
  const auto& names = spec.extra_fields;
  const auto found = std::find(names.begin(), names.end(), "truncated");
  if (found == names.end()) return nullptr;
  return &arrays[spec.num_observation_arrays + kStandardFields +
                 static_cast<size_t>(found - names.begin())];
}

const ArraySpec& spec_of(const Array& array) { return array.spec(); }
const ArraySpec& spec_of(const ArraySpec& spec) { return spec; }
template <typename T>
std::string describe(const std::vector<T>& arrays) {
  std::string text;
  for (const T& array : arrays) {
    text += (text.empty() ? "" : ", ") + spec_of(array).to_string();
  }
  return text.empty() ? "nothing" : text;
}

// As many of the first as there are of the second.
void copy_arrays(const std::vector<Array>& from, const std::vector<Array>& to) {
  for (size_t i = 0; i < to.size(); ++i) copy(from[i], to[i]);
}

// Also gives the other environments' rows, which may be anything, their observations.
void check_final_observation(const StreamSpec& spec, const EnvRow& row) {
  const Array* field = truncated(spec, row.arrays);
  const size_t wanted =
      field != nullptr && any(*field) ? spec.num_observation_arrays : 0;
  if (row.final_observation.size() != wanted) {
    throw WireError("a step with " + std::to_string(row.final_observation.size()) +
                    " arrays of final_observation, where " + std::to_string(wanted) +
                    " are due: all of the observation if an episode was truncated, "
                    "else none");
  }
  for (size_t i = 0; i < row.final_observation.size(); ++i) {
    const Array &from = row.arrays[i], &to = row.final_observation[i];
    const size_t bytes = to.num_bytes() / static_cast<size_t>(spec.num_envs);
    for (size_t e = 0; e < static_cast<size_t>(spec.num_envs) && bytes > 0; ++e) {
      if (field->data()[e] != 0) continue;
      std::memcpy(to.data() + e * bytes, from.data() + e * bytes, bytes);
    }
  }
  try {
    check_values(spec, row.final_observation);
  } catch (const WireError& error) {
    throw WireError(std::string("final_observation: ") + error.what());
  }
}

}  // namespace

// --- Reading
// --------------------------------------------------------------------------

EnvRow read_row(Connection& connection, const StreamSpec& spec, UnrollContext& context,
                std::vector<Array> arrays) {
  grpc::ByteBuffer message;
  connection.read(&message);
  context.bytes_received += message.Length();
  EnvRow row;
  row.arrays = std::move(arrays);
  if (row.arrays.empty()) {
    for (const ArraySpec& wanted : spec.arrays) {
      row.arrays.push_back(context.message_pool.allocate(wanted));
    }
  }
  const auto into_final = [&](size_t i, const ArraySpec& got) {
    if (i >= spec.num_observation_arrays || got != spec.arrays[i]) {
      throw WireError("final_observation has " + got.to_string() + " as array " +
                      std::to_string(i) + ", not as the observation");
    }
    row.final_observation.push_back(context.message_pool.allocate(got));
    return row.final_observation.back();
  };
  const Decoded decoded =
      decode_env_message(&message, expect(spec.arrays, row.arrays, "step"), into_final);
  if (decoded.kind == Decoded::kError) {
    throw EnvironmentError(connection.peer() + " failed:\n" + decoded.error);
  }
  if (decoded.kind != Decoded::kStep) throw WireError("a second hello");
  if (decoded.num_arrays != row.arrays.size()) {
    throw WireError("a step with " + std::to_string(decoded.num_arrays) +
                    " arrays, where the hello announced " +
                    std::to_string(row.arrays.size()));
  }
  check_values(spec, row.arrays);
  check_final_observation(spec, row);
  for (const Array& array : row.arrays) context.bytes_copied += array.num_bytes();
  row.env_nanoseconds = decoded.env_nanoseconds;
  return row;
}

bool is_between_episodes(const StreamSpec& spec, const EnvRow& row) {
  return all(row.arrays[spec.num_observation_arrays + kDoneField]);
}

// --- Steps
// ----------------------------------------------------------------------------

Unroll::Unroll(UnrollContext* context, StreamSpec spec, const EnvRow& first,
               uint64_t first_number, Interrupt interrupt)
    : context_(*context),
      spec_(std::move(spec)),
      interrupt_(std::move(interrupt)),
      rollout_(make_rollout(tile(context_.initial_state))),
      newest_number_(first_number),
      state_before_(rollout_.initial_state) {
  copy_arrays(first.arrays, env_row(0));
  context_.env_ns += first.env_nanoseconds;
  answer(first.final_observation);
}

bool Unroll::is_between_episodes() const {
  return all(rollout_.env[spec_.num_observation_arrays + kDoneField].at(t_));
}

bool Unroll::step(Connection& connection) {
  EnvRow next;
  {
    const WaitTimer timer(&context_.env_wait_ns);
    connection.write(encode_action(action_, context_.message_pool));
    next = read_row(connection, spec_, context_, env_row(t_ + 1));
  }
  return advance(next.final_observation, next.env_nanoseconds);
}

bool Unroll::take(const EnvRow& next) {
  copy_arrays(next.arrays, env_row(t_ + 1));
  return advance(next.final_observation, next.env_nanoseconds);
}

void Unroll::hand_over(const EnvRow& first, uint64_t first_number) {
  std::vector<Array> observation = env_row(t_);
  observation.resize(spec_.num_observation_arrays);
  copy_arrays(first.arrays, observation);
  context_.env_ns += first.env_nanoseconds;
  newest_number_ = first_number;
  act();
}

// Row t + 1 is there.
bool Unroll::advance(const std::vector<Array>& final_observation,
                     uint64_t env_nanoseconds) {
  ++t_;
  ++newest_number_;
  context_.num_steps += static_cast<uint64_t>(spec_.num_envs);
  context_.env_ns += env_nanoseconds;
  state_before_ = state_after_;
  answer(final_observation);
  if (t_ < context_.unroll_length) return false;
  finish_rollout();
  return true;
}

// --- The agent
// ------------------------------------------------------------------------

// Asks about the newest row, and about the ends of its truncated episodes.
void Unroll::answer(const std::vector<Array>& final_observation) {
  truncation_value_.reset();
  if (!final_observation.empty()) truncation_value_ = evaluate(final_observation);
  act();
}

// Asks what to do in the newest row, and writes the answer into it.
void Unroll::act() {
  ArrayNest outputs = compute(env_nest(env_time_row(t_)));
  write_agent_row(rollout_, t_, outputs.vector()[0]);
  if (truncation_value_) {
    copy(*truncation_value_,
         rollout_.agent->dict().at("truncation_value").leaf().row(t_));
  }
  action_ = action_of(outputs.vector()[0]);
  state_after_ = std::move(outputs.vector()[1]);
}

// The agent's ((action, ...), new_state), checked.
ArrayNest Unroll::compute(ArrayNest env_outputs) {
  ArrayNest inputs(ArrayNest::Vector{std::move(env_outputs), state_before_});
  ArrayNest outputs;
  {
    const WaitTimer timer(&context_.inference_wait_ns);
    outputs = context_.inference_batcher->compute(std::move(inputs), interrupt_);
  }
  if (!outputs.is_vector() || outputs.vector().size() != 2) {
    throw std::invalid_argument(
        "the agent's outputs must be ((action, ...), new_agent_state), and they "
        "are " +
        outputs.describe());
  }
  try {
    nest::for_each2(
        [](const Array& before, const Array& after) {
          if (before.spec() != after.spec()) {
            throw std::invalid_argument("from " + before.spec().to_string() + " to " +
                                        after.spec().to_string());
          }
        },
        state_before_, std::as_const(outputs.vector()[1]));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        std::string("the agent state must keep its form, and it changes: ") +
        error.what());
  }
  return outputs;
}

// The baseline at the end of truncated episodes, 0 elsewhere; nothing if the agent's
// outputs have no place for it.
std::optional<Array> Unroll::evaluate(const std::vector<Array>& final_observation) {
  if (!evaluates_) return std::nullopt;
  std::vector<Array> inputs = env_time_row(t_);
  const Array ended = truncated(spec_, inputs)->at(0);
  for (size_t i = 0; i < final_observation.size(); ++i) {
    inputs[i] = final_observation[i].with_leading_one();
  }
  Array& done = inputs[spec_.num_observation_arrays + kDoneField];
  done = context_.message_pool.allocate(done.spec());
  std::memset(done.data(), 0, done.num_bytes());
  ArrayNest outputs = compute(env_nest(std::move(inputs)));
  const ArrayNest& agent = outputs.vector()[0];
  evaluates_ = agent.is_map() && agent.dict().count("baseline") > 0 &&
               agent.dict().count("truncation_value") > 0;
  if (!evaluates_) return std::nullopt;
  const ArraySpec wanted{DType::kFloat32, Shape{1, spec_.num_envs}};
  for (const char* name : {"baseline", "truncation_value"}) {
    const ArrayNest& value = agent.dict().at(name);
    if (!value.is_leaf() || value.leaf().spec() != wanted) {
      throw std::invalid_argument("the agent's " + std::string(name) + " must be " +
                                  wanted.to_string());
    }
  }
  Array value = agent.dict().at("baseline").leaf();
  for (int64_t e = 0; e < spec_.num_envs; ++e) {
    if (ended.data()[e] == 0) value.as<float>()[e] = 0;
  }
  return value;
}

void Unroll::write_agent_row(Rollout& rollout, int64_t t, const ArrayNest& outputs) {
  if (!rollout.agent) {
    rollout.agent = outputs.map([this](const Array& array) {
      const Shape& shape = array.shape();
      if (shape.size() < 2 || shape[0] != 1 || shape[1] != spec_.num_envs) {
        throw std::invalid_argument("the agent's outputs must be [1, " +
                                    std::to_string(spec_.num_envs) +
                                    ", ...], and one is " + shape.to_string());
      }
      ArraySpec spec = array.spec();
      spec.shape[0] = context_.unroll_length + 1;
      return context_.rollout_pool.allocate(spec);
    });
  }
  try {
    nest::for_each2(
        [&](const Array& from, const Array& to) {
          context_.bytes_copied += copy(from, to.row(t));
        },
        outputs, std::as_const(*rollout.agent));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        std::string("the agent's outputs must keep their form: ") + error.what());
  }
}

std::vector<Array> Unroll::action_of(const ArrayNest& outputs) const {
  const ArrayNest* action = nullptr;
  if (outputs.is_vector() && !outputs.vector().empty()) {
    action = &outputs.vector()[0];
  } else if (outputs.is_map() && outputs.dict().count("action") > 0) {
    action = &outputs.dict().at("action");
  } else {
    throw std::invalid_argument(
        "the agent's outputs must be (action, ...) or a dict with \"action\", and "
        "they are " +
        outputs.describe());
  }
  std::vector<Array> arrays;
  action->for_each([&](const Array& array) { arrays.push_back(array.at(0)); });
  if (spec_.has_action) {
    const std::vector<ArraySpec> wanted = spec_.action.flatten();
    bool fits = wanted.size() == arrays.size();
    for (size_t i = 0; fits && i < wanted.size(); ++i) {
      fits = wanted[i] == arrays[i].spec();
    }
    if (!fits) {
      throw std::invalid_argument("the agent's action is " + describe(arrays) +
                                  ", and the environments want " + describe(wanted) +
                                  " (behind a leading 1)");
    }
  }
  return arrays;
}

// --- Rollouts
// -------------------------------------------------------------------------

Unroll::Rollout Unroll::make_rollout(ArrayNest initial_state) {
  Rollout rollout;
  rollout.initial_state = std::move(initial_state);
  for (const ArraySpec& spec : spec_.arrays) {
    rollout.env.push_back(context_.rollout_pool.allocate(
        {spec.dtype, spec.shape.behind({context_.unroll_length + 1})}));
  }
  return rollout;
}

void Unroll::copy_row(const Rollout& from, int64_t from_row, Rollout& to,
                      int64_t to_row) {
  for (size_t i = 0; i < from.env.size(); ++i) {
    context_.bytes_copied += copy(from.env[i].row(from_row), to.env[i].row(to_row));
  }
  write_agent_row(to, to_row, from.agent->map([from_row](const Array& array) {
    return array.row(from_row);
  }));
}

// Hands the rollout to the learner; its last row is the first of the next.
void Unroll::finish_rollout() {
  Rollout next = make_rollout(state_before_);
  copy_row(rollout_, t_, next, 0);
  ArrayNest item(
      ArrayNest::Vector{ArrayNest(ArrayNest::Vector{env_nest(std::move(rollout_.env)),
                                                    std::move(*rollout_.agent)}),
                        std::move(rollout_.initial_state)});
  rollout_ = std::move(next);
  t_ = 0;
  const WaitTimer timer(&context_.queue_wait_ns);
  context_.learner_queue->enqueue(std::move(item), interrupt_);
  ++context_.num_rollouts;
}

std::vector<Array> Unroll::env_row(int64_t t) const {
  std::vector<Array> row;
  row.reserve(rollout_.env.size());
  for (const Array& array : rollout_.env) row.push_back(array.at(t));
  return row;
}

std::vector<Array> Unroll::env_time_row(int64_t t) const {
  std::vector<Array> row;
  row.reserve(rollout_.env.size());
  for (const Array& array : rollout_.env) row.push_back(array.row(t));
  return row;
}

// (observation, reward, done, episode_step, episode_return[, extra fields])
ArrayNest Unroll::env_nest(std::vector<Array> arrays) const {
  const auto rest = arrays.begin() + static_cast<int64_t>(spec_.num_observation_arrays);
  ArrayNest::Vector fields;
  fields.reserve(1 + kStandardFields + 1);
  fields.push_back(
      nest::pack_as(spec_.observation, std::vector<Array>(arrays.begin(), rest)));
  for (size_t i = 0; i < kStandardFields; ++i) {
    fields.emplace_back(std::move(rest[static_cast<int64_t>(i)]));
  }
  if (!spec_.extra_fields.empty()) {
    ArrayNest::Map extra;
    auto array = rest + kStandardFields;
    for (const std::string& name : spec_.extra_fields) extra.emplace(name, *array++);
    fields.emplace_back(std::move(extra));
  }
  return ArrayNest(std::move(fields));
}

// [layers, 1, ...] -> [layers, E, ...]
ArrayNest Unroll::tile(const ArrayNest& state) {
  return state.map([this](const Array& array) {
    const int64_t n = array.shape()[1];
    if (n == spec_.num_envs) return array;
    if (n == 1) {
      return concatenate(std::vector<Array>(static_cast<size_t>(spec_.num_envs), array),
                         1, context_.message_pool, false);
    }
    throw std::invalid_argument("the initial agent state has " +
                                array.shape().to_string() +
                                ", and dimension 1 must be 1 or the number of "
                                "environments of a stream, " +
                                std::to_string(spec_.num_envs));
  });
}

}  // namespace torchbeast
