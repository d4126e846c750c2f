// Unroll alone: no connection, no queue, no threads.

#include "unroll.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "session.h"

namespace torchbeast {
namespace {

constexpr int64_t T = 5, E = 3;

class UnrollTest : public GuardedTest {
 protected:
  UnrollTest() : environment_(0, E), spec_(environment_.hello()) {}

  static EnvRow to_row(EnvRow row) {
    row.env_nanoseconds = 7;
    return row;
  }
  std::unique_ptr<UnrollContext> make_context(bool named_rows,
                                              uint64_t max_bytes = 1 << 20) {
    return std::unique_ptr<UnrollContext>(
        new UnrollContext{T, CountingAgent::initial_state(), named_rows, max_bytes});
  }
  std::unique_ptr<Unroll> begin(UnrollContext* context) {
    return std::make_unique<Unroll>(context, spec_, to_row(environment_.reset()), 0);
  }
  // Answers all questions, returns how many there were.
  int answer(Unroll& unroll) {
    int number = 0;
    for (; auto question = unroll.question(); ++number) {
      unroll.answer(agent_.act(*question));
    }
    return number;
  }
  void step(Unroll& unroll) { unroll.take(to_row(environment_.step(unroll.action()))); }

  CountingEnvironment environment_;
  const StreamSpec spec_;
  CountingAgent agent_;
};

class RowsTest : public UnrollTest, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Named, RowsTest, testing::Bool());

TEST_P(RowsTest, RolloutsAreWhatHappened) {
  const auto context = make_context(GetParam());
  const auto unroll = begin(context.get());
  Checker checker(T, true);
  int num_questions = answer(*unroll);
  for (int i = 1; i <= 20 * T; ++i) {
    step(*unroll);
    num_questions += answer(*unroll);
    EXPECT_EQ(unroll->newest_number(), static_cast<uint64_t>(i));
    const auto rollout = unroll->take_rollout();
    ASSERT_EQ(rollout.has_value(), i % T == 0);
    if (rollout) {
      ASSERT_NO_FATAL_FAILURE(checker.check(*rollout));
    }
    EXPECT_EQ(unroll->num_unfinished_steps(), i % T * E);
    EXPECT_FALSE(unroll->take_rollout()) << "it was taken";
  }
  EXPECT_EQ(checker.num_environments(), static_cast<size_t>(E));
  EXPECT_EQ(context->num_steps, 20u * T * E);
  EXPECT_EQ(context->env_ns, 7u * (20 * T + 1));
  EXPECT_GT(num_questions, 20 * T + 10) << "truncated episodes need one more";
}

TEST_F(UnrollTest, AsksAboutTheRealEndOfTruncatedEpisodesFirst) {
  const auto context = make_context(true);
  const auto unroll = begin(context.get());
  answer(*unroll);
  EnvRow row;
  while (row.final_observation.empty()) {
    row = to_row(environment_.step(unroll->action()));
    unroll->take(row);
    if (row.final_observation.empty()) answer(*unroll);
    unroll->take_rollout();
  }
  const ArrayNest end = unroll->question().value();
  const ArrayNest& shown = end.vector()[0];
  EXPECT_EQ(field(shown, "observation").dict().at("position").leaf().data(),
            row.final_observation[1].data());
  const Array& truncated = field(shown, "truncated").leaf();
  EXPECT_EQ(std::count(truncated.data(), truncated.data() + E, 1), 1);
  const Array& done = field(shown, "done").leaf();
  EXPECT_EQ(std::count(done.data(), done.data() + E, 0), E);

  unroll->answer(agent_.act(end));
  const ArrayNest next = unroll->question().value();
  EXPECT_EQ(next.vector()[1].leaf().data(), end.vector()[1].leaf().data())
      << "the state before the step";
  EXPECT_EQ(values_of(next.vector()[1].leaf()), values_of(end.vector()[1].leaf()));
  const Array& row_done = field(next.vector()[0], "done").leaf();
  EXPECT_GE(std::count(row_done.data(), row_done.data() + E, 1), 1);
  unroll->answer(agent_.act(next));
  EXPECT_FALSE(unroll->question());
}

TEST_F(UnrollTest, AGameIsAnEpisodeUnlessTheEnvironmentSaysOtherwise) {
  const auto context = make_context(true);
  const auto unroll = begin(context.get());
  const ArrayNest question = unroll->question().value();
  const ArrayNest& row = question.vector()[0];
  EXPECT_EQ(field(row, "game_over").leaf().data(), field(row, "done").leaf().data());
  EXPECT_EQ(field(row, "game_step").leaf().data(),
            field(row, "episode_step").leaf().data());
  EXPECT_EQ(field(row, "game_return").leaf().data(),
            field(row, "episode_return").leaf().data());

  wire::EnvHello hello = environment_.hello();
  auto* const extra = hello.add_extra_fields();
  extra->set_name("game_over");
  extra->set_dtype(wire::BOOL);
  EnvRow first = environment_.reset();
  MemoryPool memory;
  first.arrays.push_back(memory.allocate({DType::kBool, {E}}));
  for (int64_t e = 0; e < E; ++e) first.arrays.back().data()[e] = e == 1;
  Unroll other(context.get(), StreamSpec(hello), first, 0);
  const ArrayNest asked = other.question().value();
  const Array& game_over = field(asked.vector()[0], "game_over").leaf();
  for (int64_t e = 0; e < E; ++e) EXPECT_EQ(game_over.data()[e], e == 1);
}

TEST_F(UnrollTest, OfTwoFieldsWithOneNameTheLearnerGetsTheAgents) {
  const auto context = make_context(true);
  const auto unroll = begin(context.get());
  const Array mine = make_array({1, E}, {1, 2, 3});
  std::optional<ArrayNest> rollout;
  while (!(rollout = unroll->take_rollout())) {
    while (auto question = unroll->question()) {
      ArrayNest outputs = agent_.act(*question);
      outputs.vector()[0].dict().emplace("reward", mine);
      unroll->answer(std::move(outputs));
    }
    if (unroll->num_unfinished_steps() < T * E) step(*unroll);
  }
  EXPECT_EQ(field(rollout->vector()[0], "reward").leaf().dtype(), DType::kInt32);
}

TEST_F(UnrollTest, ReadsIntoTheRolloutWithoutACopy) {
  const auto context = make_context(false);
  const auto unroll = begin(context.get());
  answer(*unroll);
  const EnvRow row = environment_.step(unroll->action());
  const std::vector<Array> memory = unroll->next_row();
  for (size_t i = 0; i < memory.size(); ++i) copy(row.arrays[i], memory[i]);
  unroll->take({memory, {}, 0});
  const ArrayNest question = unroll->question().value();
  EXPECT_EQ(field(question.vector()[0], "reward").leaf().data(), memory[2].data());
}

TEST_F(UnrollTest, NewcomersGoOnWithTheirObservation) {
  const auto context = make_context(true);
  const auto unroll = begin(context.get());
  answer(*unroll);
  // Episodes have 2, 3 and 4 steps, so all end together after 12.
  while (unroll->newest_number() < 12) {
    step(*unroll);
    answer(*unroll);
    unroll->take_rollout();
    EXPECT_EQ(unroll->is_between_episodes(), unroll->newest_number() == 12);
  }
  CountingEnvironment newcomer(4, E);
  unroll->hand_over(to_row(newcomer.reset()), 30);
  EXPECT_EQ(unroll->newest_number(), 30u);
  const ArrayNest question = unroll->question().value();
  const ArrayNest& row = question.vector()[0];
  const Array& position = field(row, "observation").dict().at("position").leaf();
  for (int64_t e = 0; e < E; ++e) {
    EXPECT_EQ(Position::decode(position.as<int64_t>()[e]).stream, 4);
    EXPECT_EQ(field(row, "episode_step").leaf().as<int64_t>()[e], 2 + e)
        << "of the episode that has ended";
  }
  EXPECT_EQ(answer(*unroll), 1);
}

TEST_F(UnrollTest, NewcomersBringTheFieldsOfTheirObservation) {
  wire::EnvHello hello = environment_.hello();
  EnvRow row = environment_.reset();
  int32_t value = 1;
  for (const char* name : {"final_goal", "goal", "lives"}) {
    wire::Field* const extra = hello.add_extra_fields();
    extra->set_name(name);
    extra->set_dtype(wire::INT32);
    row.arrays.push_back(numbered({E}, value++));
  }
  const auto context = make_context(true);
  Unroll unroll(context.get(), StreamSpec(hello), row, 0);
  EnvRow newcomer = row;
  for (size_t i = 1; i <= 3; ++i)
    newcomer.arrays[row.arrays.size() - i] = numbered({E}, 9);
  unroll.hand_over(newcomer, 30);
  const ArrayNest question = unroll.question().value();
  const auto first = [&question](const char* name) {
    return field(question.vector()[0], name).leaf().as<int32_t>()[0];
  };
  EXPECT_EQ(first("goal"), 9);
  EXPECT_EQ(first("final_goal"), 1) << "of the episode that has ended";
  EXPECT_EQ(first("lives"), 3) << "the same";
}

TEST_F(UnrollTest, AnswersThatDoNotFitAreRefused) {
  const auto error_of_answer = [&](bool named_rows, auto&& change) {
    const auto context = make_context(named_rows);
    const auto unroll = begin(context.get());
    ArrayNest outputs = agent_.act(unroll->question().value());
    change(outputs);
    return error_of<std::invalid_argument>([&] { unroll->answer(std::move(outputs)); });
  };
  const auto contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  contains(error_of_answer(false, [](ArrayNest& x) { x = ArrayNest(); }),
           "((action, ...), new_agent_state)");
  contains(error_of_answer(false,
                           [](ArrayNest& x) {
                             x.vector()[1] = make_array({2, 1, 1}, {0, 0});
                           }),
           "must keep its form");
  contains(error_of_answer(
               false,
               [](ArrayNest& x) {
                 x.vector()[0].dict().at("action") = make_array({1, E}, {0, 0, 0});
               }),
           "int32 [3], and the environments want int64 [3]");
  contains(error_of_answer(
               false,
               [](ArrayNest& x) {
                 x.vector()[0].dict().at("baseline") = make_array({1, 2}, {0, 0});
               }),
           "[1, 3, ...], and one is [1, 2]");
  agent_.as_tuple = true;
  const auto context = make_context(false);
  EXPECT_EQ(answer(*begin(context.get())), 1);
  contains(error_of_answer(true, [](ArrayNest&) {}), "a dict with \"action\"");
}

TEST_F(UnrollTest, TheRolloutsOfAllStreamsAreBounded) {
  uint64_t bytes = 0;
  for (const ArraySpec& array : spec_.arrays) bytes += array.num_bytes() * (T + 1);
  const auto context = make_context(false, 2 * bytes + bytes / 2);
  const auto first = begin(context.get());
  auto second = begin(context.get());
  EXPECT_EQ(context->num_bytes, 2 * bytes);
  const std::string error = error_of<TooManyBytes>([&] { begin(context.get()); });
  EXPECT_NE(error.find(std::to_string(2 * bytes)), std::string::npos) << error;
  second.reset();
  EXPECT_NO_THROW(begin(context.get()));
  EXPECT_EQ(context->num_bytes, bytes);

  EXPECT_NO_THROW(check_rollout_bytes(spec_, T, 2, 2 * bytes));
  EXPECT_THROW(check_rollout_bytes(spec_, T, 3, 2 * bytes), TooManyBytes);
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  EXPECT_THROW(
      check_rollout_bytes(spec_, std::numeric_limits<int64_t>::max(), kMost, 1),
      TooManyBytes);
}

}  // namespace
}  // namespace torchbeast
