#include "unroll.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace torchbeast {

namespace {

std::string describe(const std::vector<ArraySpec>& specs) {
  std::string text;
  for (const ArraySpec& spec : specs) {
    text += (text.empty() ? "" : ", ") + spec.to_string();
  }
  return text.empty() ? "nothing" : text;
}

}  // namespace

void check_rollout_bytes(const StreamSpec& spec, int64_t unroll_length,
                         uint64_t num_streams, uint64_t max_bytes) {
  const uint64_t step = spec.step_bytes;
  const auto num_rows = static_cast<uint64_t>(unroll_length) + 1;
  // Such a product may be larger than any integer.
  if (step <= max_bytes / num_rows / std::max<uint64_t>(num_streams, 1)) return;
  throw TooManyBytes(
      "the rollouts of " + std::to_string(num_streams) + " streams, each of " +
      std::to_string(num_rows) + " rows of " + std::to_string(step) +
      " bytes, exceed max_rollout_bytes, which is " + std::to_string(max_bytes) +
      ": use fewer streams, shorter unrolls, or more memory");
}

RolloutBytes::RolloutBytes(UnrollContext* context, const StreamSpec& spec)
    : context_(*context) {
  check_rollout_bytes(spec, context_.unroll_length, 1, context_.max_bytes);
  const uint64_t bytes =
      spec.step_bytes * static_cast<uint64_t>(context_.unroll_length + 1);
  const uint64_t others = context_.num_bytes.fetch_add(bytes);
  num_bytes_ = bytes;
  if (others <= context_.max_bytes - bytes) return;
  context_.num_bytes -= bytes;
  throw TooManyBytes("its rollout has " + std::to_string(bytes) +
                     " bytes and those of other streams " + std::to_string(others) +
                     "; together they exceed max_rollout_bytes, which is " +
                     std::to_string(context_.max_bytes));
}

Unroll::Unroll(UnrollContext* context, StreamSpec spec, const EnvRow& first,
               uint64_t first_number)
    : context_(*context),
      spec_(std::move(spec)),
      action_specs_(spec_.action.flatten()),
      bytes_(context, spec_),
      rollout_(make_rollout(tile(context_.initial_state))),
      newest_number_(first_number),
      state_before_(rollout_.initial_state) {
  write_env_row(first);
}

// --- Steps

void Unroll::take(const EnvRow& next) {
  ++t_;
  ++newest_number_;
  state_before_ = state_after_;
  context_.num_steps += static_cast<uint64_t>(spec_.num_envs);
  write_env_row(next);
}

void Unroll::hand_over(const EnvRow& first, uint64_t first_number) {
  copy_into_row(first.arrays, spec_.num_observation_arrays);
  const auto& names = spec_.names;
  for (size_t i = spec_.num_observation_arrays; i < names.size(); ++i) {
    const bool has_final =
        std::find(names.begin(), names.end(), "final_" + names[i]) != names.end();
    if (has_final) copy(first.arrays[i], rollout_.env[i].at(t_));
  }
  context_.env_ns += first.env_nanoseconds;
  newest_number_ = first_number;
  state_before_ = tile(context_.initial_state);
  if (t_ == 0) rollout_.initial_state = state_before_;
  acted_ = false;
}

void Unroll::copy_into_row(const std::vector<Array>& from, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const Array to = rollout_.env[i].at(t_);
    if (from[i].data() != to.data()) copy(from[i], to);
  }
}

void Unroll::write_env_row(const EnvRow& row) {
  copy_into_row(row.arrays, rollout_.env.size());
  context_.env_ns += row.env_nanoseconds;
  if (evaluates_) final_observation_ = row.final_observation;
  truncation_value_.reset();
  acted_ = false;
}

bool Unroll::is_between_episodes() const {
  return torchbeast::is_between_episodes(spec_, env_row(t_));
}

// --- The agent

// First about the real end of truncated episodes, then about the newest row.
std::optional<ArrayNest> Unroll::question() {
  if (acted_) return std::nullopt;
  ArrayNest row = final_observation_.empty()
                      ? rollout_.rows.map([t = t_](const Array& a) { return a.row(t); })
                      : final_row();
  return ArrayNest(ArrayNest::Vector{std::move(row), state_before_});
}

// The newest row as it would be if no episode had ended.
ArrayNest Unroll::final_row() const {
  std::vector<Array> env;
  for (const Array& array : rollout_.env) env.push_back(array.row(t_));
  for (size_t i = 0; i < final_observation_.size(); ++i) {
    env[i] = final_observation_[i].with_leading_one();
  }
  Array& done = env[spec_.num_observation_arrays + kDoneField];
  done = context_.message_pool.allocate(done.spec());
  std::memset(done.data(), 0, done.num_bytes());
  return env_nest(std::move(env));
}

void Unroll::answer(ArrayNest outputs) {
  check_form(outputs);
  ArrayNest& agent = outputs.vector()[0];
  if (!final_observation_.empty()) {
    final_observation_.clear();
    keep_truncation_value(agent);
    return;
  }
  write_agent_row(rollout_, t_, agent);
  if (truncation_value_) {
    if (!agent.is_map() || agent.dict().count("truncation_value") == 0) {
      throw std::invalid_argument(
          "the agent's outputs must keep their form: those for an episode's last "
          "observation have a truncation_value, and those for the next row have none");
    }
    copy(*truncation_value_,
         rollout_.agent->dict().at("truncation_value").leaf().row(t_));
  }
  action_ = action_of(agent);
  state_after_ = std::move(outputs.vector()[1]);
  acted_ = true;
}

void Unroll::check_form(const ArrayNest& outputs) const {
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
        state_before_, outputs.vector()[1]);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        std::string("the agent state must keep its form, and it changes: ") +
        error.what());
  }
}

// The baseline at the end of truncated episodes, 0 elsewhere; nothing if the agent's
// outputs have no place for it.
void Unroll::keep_truncation_value(const ArrayNest& outputs) {
  evaluates_ = outputs.is_map() && outputs.dict().count("baseline") > 0 &&
               outputs.dict().count("truncation_value") > 0;
  if (!evaluates_) return;
  const ArrayNest& baseline = outputs.dict().at("baseline");
  const ArrayNest& kept = outputs.dict().at("truncation_value");
  const auto fits = [this](const ArrayNest& value) {
    if (!value.is_leaf() || value.leaf().dtype() != DType::kFloat32) return false;
    const Shape& shape = value.leaf().shape();
    return shape.size() >= 2 && shape[0] == 1 && shape[1] == spec_.num_envs;
  };
  if (!fits(baseline) || !fits(kept) ||
      !(baseline.leaf().shape() == kept.leaf().shape())) {
    throw std::invalid_argument(
        "the agent's baseline and truncation_value must be float32 [1, " +
        std::to_string(spec_.num_envs) + ", ...], with the same shape");
  }
  truncation_value_ = baseline.leaf();
  const Array truncated = rollout_.env[*spec_.truncated].at(t_);
  float* const values = truncation_value_->as<float>();
  const auto per_env =
      static_cast<int64_t>(truncation_value_->spec().num_elements()) / spec_.num_envs;
  for (int64_t e = 0; e < spec_.num_envs; ++e) {
    if (truncated.data()[e] == 0) std::fill_n(values + e * per_env, per_env, 0.0F);
  }
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
        outputs, *rollout.agent);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        std::string("the agent's outputs must keep their form: ") + error.what());
  }
}

std::vector<Array> Unroll::action_of(const ArrayNest& outputs) const {
  const ArrayNest* action = nullptr;
  if (outputs.is_map() && outputs.dict().count("action") > 0) {
    action = &outputs.dict().at("action");
  } else if (outputs.is_vector() && !outputs.vector().empty() && !context_.named_rows) {
    action = &outputs.vector()[0];
  } else {
    throw std::invalid_argument(std::string("the agent's outputs must be ") +
                                (context_.named_rows ? "" : "(action, ...) or ") +
                                "a dict with \"action\", and they are " +
                                outputs.describe());
  }
  std::vector<Array> arrays;
  std::vector<ArraySpec> specs;
  action->for_each([&](const Array& array) {
    arrays.push_back(array.at(0));
    specs.push_back(arrays.back().spec());
  });
  const bool fits = spec_.has_action_space
                        ? specs == action_specs_
                        : specs.size() == 1 && specs[0].shape.size() > 0 &&
                              specs[0].shape[0] == spec_.num_envs;
  if (fits) return arrays;
  throw std::invalid_argument(
      "the agent's action is " + describe(specs) + ", and " +
      (spec_.has_action_space
           ? "the environments want " + describe(action_specs_) +
                 " (behind a leading 1)"
           : "environments without an action space get one array [1, " +
                 std::to_string(spec_.num_envs) + ", ...]"));
}

// --- Rollouts

Unroll::Rollout Unroll::make_rollout(ArrayNest initial_state) {
  Rollout rollout;
  rollout.initial_state = std::move(initial_state);
  for (const ArraySpec& spec : spec_.arrays) {
    rollout.env.push_back(context_.rollout_pool.allocate(
        {spec.dtype, spec.shape.behind({context_.unroll_length + 1})}));
  }
  rollout.rows = env_nest(rollout.env);
  return rollout;
}

std::optional<ArrayNest> Unroll::take_rollout() {
  if (t_ < context_.unroll_length || !acted_) return std::nullopt;
  Rollout next = make_rollout(state_before_);
  for (size_t i = 0; i < next.env.size(); ++i) {
    context_.bytes_copied += copy(rollout_.env[i].row(t_), next.env[i].row(0));
  }
  write_agent_row(next, 0, rollout_.agent->map([t = t_](const Array& array) {
    return array.row(t);
  }));
  ArrayNest rows = std::move(rollout_.rows);
  if (context_.named_rows) {
    // If both have a field of one name, it is the agent's.
    rollout_.agent->dict().merge(std::move(rows.dict()));
    rows = std::move(*rollout_.agent);
  } else {
    rows = ArrayNest(ArrayNest::Vector{std::move(rows), std::move(*rollout_.agent)});
  }
  ArrayNest rollout(
      ArrayNest::Vector{std::move(rows), std::move(rollout_.initial_state)});
  rollout_ = std::move(next);
  t_ = 0;
  return rollout;
}

std::vector<Array> Unroll::env_row(int64_t t) const {
  std::vector<Array> row;
  row.reserve(rollout_.env.size());
  for (const Array& array : rollout_.env) row.push_back(array.at(t));
  return row;
}

// {observation, reward, done, ..., the extra fields}
ArrayNest Unroll::named(std::vector<Array> arrays) const {
  const size_t first = spec_.num_observation_arrays;
  ArrayNest::Map row;
  for (size_t i = first; i < arrays.size(); ++i) row.emplace(spec_.names[i], arrays[i]);
  arrays.resize(first);
  row.emplace("observation", nest::pack_as(spec_.observation, std::move(arrays)));
  // A game is an episode, unless the environments say otherwise.
  row.emplace("game_over", row.at("done"));
  row.emplace("game_step", row.at("episode_step"));
  row.emplace("game_return", row.at("episode_return"));
  return ArrayNest(std::move(row));
}

// (observation, reward, done, episode_step, episode_return[, extra fields])
ArrayNest Unroll::positional(std::vector<Array> arrays) const {
  const size_t first = spec_.num_observation_arrays;
  ArrayNest::Vector fields(
      arrays.begin() + static_cast<int64_t>(first),
      arrays.begin() + static_cast<int64_t>(first + kStandardFields));
  ArrayNest::Map extra;
  for (size_t i = first + kStandardFields; i < arrays.size(); ++i) {
    extra.emplace(spec_.names[i], arrays[i]);
  }
  if (!extra.empty()) fields.emplace_back(std::move(extra));
  arrays.resize(first);
  fields.insert(fields.begin(), nest::pack_as(spec_.observation, std::move(arrays)));
  return ArrayNest(std::move(fields));
}

// [layers, 1, ...] -> [layers, E, ...]
ArrayNest Unroll::tile(const ArrayNest& state) {
  return state.map([this](const Array& array) {
    const int64_t n = array.shape()[1];
    if (n == 1 || n == spec_.num_envs) {  // also one is copied: the learner may write
      const auto copies = static_cast<size_t>(spec_.num_envs / n);
      return concatenate(std::vector<Array>(copies, array), 1, context_.message_pool);
    }
    throw Ended(End::kRefused, "the initial agent state has " +
                                   array.shape().to_string() +
                                   ", and dimension 1 must be 1 or the number of "
                                   "environments of a stream, " +
                                   std::to_string(spec_.num_envs));
  });
}

}  // namespace torchbeast
