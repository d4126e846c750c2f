// Environments whose rows say where they are, so that rollouts can be checked exactly.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "array.h"
#include "codec.h"
#include "environment.h"

namespace torchbeast {

constexpr int64_t kNumActions = 7;

// What environment e of stream s observes: a number that holds all of this.
struct Position {
  int64_t stream, env, episode, step, last_action;

  int64_t encode() const {
    return (((stream * 10 + env) * 1'000'000 + episode) * 100 + step) * 10 +
           last_action;
  }
  static Position decode(int64_t number) {
    return {number / 10'000'000'000, number / 1'000'000'000 % 10,
            number / 1000 % 1'000'000, number / 10 % 100, number % 10};
  }
};

// Environment e has episodes of 2 + e steps, every second of which is truncated. The
// observation is a dict: "position" INT64 [] and "picture" UINT8 [2, 3], all bytes the
// step.
class CountingEnvironment : public Environment {
 public:
  CountingEnvironment(int64_t stream, int64_t num_envs, bool with_truncation = true,
                      std::string name = "Counting-v0")
      : stream_(stream), num_envs_(num_envs), with_truncation_(with_truncation) {
    hello_.set_version(kWireVersion);
    hello_.set_environment(std::move(name));
    hello_.set_num_envs(static_cast<uint32_t>(num_envs));
    auto* dict = hello_.mutable_observation_space()->mutable_dict();
    dict->add_keys("picture");
    auto* picture = dict->add_values()->mutable_box();
    picture->set_dtype(wire::UINT8);
    picture->add_shape(2);
    picture->add_shape(3);
    dict->add_keys("position");
    auto* position = dict->add_values()->mutable_box();
    position->set_dtype(wire::INT64);
    position->add_high(static_cast<double>(int64_t{1} << 50));
    hello_.mutable_action_space()->mutable_discrete()->set_n(kNumActions);
    if (with_truncation) {
      auto* field = hello_.add_extra_fields();
      field->set_name("truncated");
      field->set_dtype(wire::BOOL);
    }
    const Shape n{num_envs};
    row_.arrays = {make({DType::kUint8, Shape{num_envs, 2, 3}}),
                   make({DType::kInt64, n}),
                   make({DType::kFloat32, n}),
                   make({DType::kBool, n}),
                   make({DType::kInt64, n}),
                   make({DType::kFloat32, n})};
    if (with_truncation) row_.arrays.push_back(make({DType::kBool, n}));
    final_ = {make(row_.arrays[0].spec()), make(row_.arrays[1].spec())};
    episode_.assign(static_cast<size_t>(num_envs), 0);
    step_.assign(static_cast<size_t>(num_envs), 0);
  }

  EnvRow reset() override {
    for (int64_t e = 0; e < num_envs_; ++e) write(e, 0, 0, true, 0, 0, false);
    return row_;
  }

  const wire::EnvHello& hello() const override { return hello_; }

  EnvRow step(const std::vector<Array>& action) override {
    row_.final_observation.clear();
    for (int64_t e = 0; e < num_envs_; ++e) {
      const int64_t a = action.at(0).as<int64_t>()[e];
      if (a < 0 || a >= kNumActions) throw std::runtime_error("no such action");
      int64_t& step = step_[static_cast<size_t>(e)];
      int64_t& episode = episode_[static_cast<size_t>(e)];
      const int64_t length = ++step;
      const bool done = length == 2 + e;
      const bool truncated = with_truncation_ && done && episode % 2 == 1;
      if (truncated) row_.final_observation = final_;
      final_[1].as<int64_t>()[e] = Position{stream_, e, episode, step, a}.encode();
      if (done) {
        step = 0;
        ++episode;
      }
      write(e, a, static_cast<float>(a), done, length, static_cast<float>(10 * length),
            truncated);
    }
    return row_;
  }

 private:
  Array make(const ArraySpec& spec) { return pool_.allocate(spec); }

  void write(int64_t e, int64_t action, float reward, bool done, int64_t length,
             float episode_return, bool truncated) {
    const int64_t step = step_[static_cast<size_t>(e)];
    for (int64_t i = 0; i < 6; ++i) {
      row_.arrays[0].data()[e * 6 + i] = static_cast<uint8_t>(step);
    }
    row_.arrays[1].as<int64_t>()[e] =
        Position{stream_, e, episode_[static_cast<size_t>(e)], step, action}.encode();
    row_.arrays[2].as<float>()[e] = reward;
    row_.arrays[3].data()[e] = done;
    row_.arrays[4].as<int64_t>()[e] = length;
    row_.arrays[5].as<float>()[e] = episode_return;
    if (with_truncation_) row_.arrays[6].data()[e] = truncated;
  }

  const int64_t stream_, num_envs_;
  const bool with_truncation_;
  wire::EnvHello hello_;
  MemoryPool pool_;
  EnvRow row_;
  std::vector<Array> final_;
  std::vector<int64_t> episode_, step_;
};

// Raises in its step `last_step`, counted from 1.
class FailingEnvironment : public CountingEnvironment {
 public:
  FailingEnvironment(int64_t stream, int64_t num_envs, int last_step)
      : CountingEnvironment(stream, num_envs), last_step_(last_step) {}
  EnvRow step(const std::vector<Array>& action) override {
    if (++count_ == last_step_) {
      throw std::runtime_error("Traceback: it broke in step " + std::to_string(count_));
    }
    return CountingEnvironment::step(action);
  }

 private:
  const int last_step_;
  int count_ = 0;
};

}  // namespace torchbeast
