// Peers that join a learner and lie, are silent or break: each loses its own stream.

#include <cmath>

#include "join_fixture.h"
#include "messages.h"

namespace torchbeast {
namespace {

class JoinRefusalsTest : public JoinTest {};

TEST_F(JoinRefusalsTest, StrangersAreRefused) {
  auto listener = listen();
  Session run(pool_options(listener));
  RunningClient client(counting(2), client_options(unix_address()));
  run.rollouts();

  CountingEnvironment environment(1, 2);
  MemoryPool pool;
  const EnvRow row = keep(environment.reset());
  const auto refusal = [&](const wire::EnvHello& hello, const grpc::ByteBuffer& step) {
    HandMade stream(unix_address());
    stream.expect_hello();
    try {
      stream.say_hello(hello);
      stream.send(step);
    } catch (const TransportError& error) {  // already
      return std::string(error.what());
    }
    return stream.end();
  };
  const grpc::ByteBuffer good = encode_step({row.arrays, {}, 0}, pool);

  EXPECT_TRUE(contains(refusal(CountingEnvironment(1, 3).hello(), good), "differ"));
  EXPECT_TRUE(contains(
      refusal(CountingEnvironment(1, 2, true, "Other-v0").hello(), good), "Other-v0"));
  EXPECT_TRUE(
      contains(refusal(CountingEnvironment(1, 2, false).hello(), good), "truncated"));
  wire::EnvHello hello = environment.hello();
  hello.set_version(1);
  EXPECT_TRUE(contains(refusal(hello, good), "speaks version 1 of the protocol"));
  EXPECT_TRUE(
      contains(refusal(hello_of(environment, std::string(65, 'x'), 0), good), "65"));
  EXPECT_TRUE(contains(refusal(hello_of(environment, "x", uint64_t{1} << 63), good),
                       "first_step"));
  const auto with = [&](size_t i, const ArraySpec& spec) {
    std::vector<Array> arrays = row.arrays;
    arrays[i] = pool.allocate(spec);
    return encode_step({arrays, {}, 0}, pool);
  };
  EXPECT_TRUE(
      contains(refusal(environment.hello(), with(0, {DType::kUint8, {2, 2, 4}})),
               "step: 68 bytes"));
  const grpc::Slice garbage(std::string(100, '\xff'));
  EXPECT_TRUE(contains(refusal(environment.hello(), grpc::ByteBuffer(&garbage, 1)),
                       "malformed"));
  {
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.send(good);
    EXPECT_TRUE(contains(stream.end(), "before the hello"));
  }
  {
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.send(encode_error("no such game"));
    stream.leave();  // all was read
    EXPECT_TRUE(contains(listener->stats().last_refusal, "no such game"));
  }
  {
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.send(encode_error(std::string(1 << 20, '\n') + "it broke at last"));
    stream.leave();
    const std::string text = listener->stats().last_refusal;
    EXPECT_TRUE(contains(text, "it broke at last"));
    EXPECT_LT(text.size(),
              100'000u);  // it is kept, and given to Python again and again
  }
  EXPECT_EQ(listener->stats().num_refused, 9u);
  run.rollouts();  // which has not been disturbed
  EXPECT_EQ(run.pool().stats().num_connected, 1u);
}

TEST_F(JoinRefusalsTest, TheNameOfTheEnvironmentMayBeLeftOut) {
  for (const bool named_first : {true, false}) {
    auto listener = listen();
    Session run(pool_options(listener));
    int number = 0;
    for (const bool named : {named_first, !named_first, true}) {
      if (number++ == 1) {  // one that is refused does not name the run
        wait_until([&] { return listener->stats().num_streams == 0; });
        CountingEnvironment bad(1, 2, false, "Other-v0");
        HandMade stream(unix_address());
        stream.expect_hello();
        stream.say_hello(bad.hello());
        EXPECT_TRUE(contains(stream.end(), "differ"));
      }
      CountingEnvironment environment(1, 2, true, named ? "Counting-v0" : "");
      HandMade stream(unix_address());
      stream.expect_hello();
      stream.say_hello(environment.hello());
      stream.send(environment.reset());
      for (int i = 0; i < kT; ++i) stream.send(environment.step(stream.receive()));
      run.rollouts();  // of which the run may learn
      stream.leave();
    }
    CountingEnvironment other(1, 2, true, "Other-v0");
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.say_hello(other.hello());
    EXPECT_TRUE(contains(stream.end(), "Other-v0"));
  }
}

TEST_F(JoinRefusalsTest, SilentPeersAreCut) {
  auto listener = listen();
  ActorPoolOptions options = pool_options(listener);
  options.step_timeout = Milliseconds(500);
  Session run(options);
  HandMade silent(unix_address());
  silent.expect_hello();
  EXPECT_TRUE(contains(silent.end(), "lost"));
  HandMade hesitant(unix_address());
  CountingEnvironment environment(1, 2);
  hesitant.expect_hello();
  hesitant.say_hello(environment.hello());
  EXPECT_TRUE(contains(hesitant.end(), "lost"));
  HandMade stuck(unix_address());
  stuck.expect_hello();
  stuck.say_hello(hello_of(environment, "stuck", 0));
  stuck.send(environment.reset());
  stuck.receive();
  EXPECT_TRUE(contains(stuck.end(), "lost"));
  wait_until([&] { return run.pool().stats().num_connected == 0; });
  EXPECT_TRUE(contains(run.pool().stats().last_error, "step timeout"));
}

TEST_F(JoinRefusalsTest, AnUnusableHelloIsRefused) {
  auto listener = listen();
  CountingEnvironment bad(1, 3);
  HandMade first(unix_address()), second(unix_address());
  for (HandMade* stream : {&first, &second}) {
    stream->expect_hello();
    stream->say_hello(bad.hello());
    stream->send(bad.reset());
  }
  const wire::EnvHello found = listener->probe(Milliseconds(60'000));
  EXPECT_EQ(found.num_envs(), 3u);
  listener->refuse(found, "E must be 2");
  EXPECT_TRUE(contains(first.end(), "E must be 2"));
  EXPECT_TRUE(contains(second.end(), "E must be 2"));

  RunningClient client(counting(2), client_options(unix_address()));
  ActorPoolOptions options = pool_options(listener);
  options.hello = listener->probe(Milliseconds(60'000));
  EXPECT_EQ(options.hello->num_envs(), 2u);
  Session run(options);
  run.rollouts();
  HandMade third(unix_address());
  third.expect_hello();
  third.say_hello(bad.hello());
  EXPECT_TRUE(contains(third.end(), "E must be 2"));
  run.rollouts();
  EXPECT_EQ(listener->stats().num_refused, 3u);
  const std::vector<Event> events = listener->events().take().first;
  ASSERT_EQ(events.size(), 3u);
  for (const Event& event : events) {
    EXPECT_EQ(event.kind, Event::kRefused);
    EXPECT_TRUE(contains(event.text, "E must be 2"));
  }
}

TEST_F(JoinRefusalsTest, BadValuesCostTheirStream) {
  auto listener = listen();
  Session run(pool_options(listener));
  RunningClient client(counting(2), client_options(unix_address()));
  run.rollouts();
  CountingEnvironment environment(7, 2);
  HandMade stream(unix_address());
  stream.expect_hello();
  stream.say_hello(environment.hello());
  stream.send(environment.reset());
  stream.send(environment.step(stream.receive()));
  EnvRow row = keep(environment.step(stream.receive()));
  row.arrays[2].as<float>()[1] = std::nanf("");
  stream.send(row);
  EXPECT_TRUE(contains(stream.end(), "reward: nan in environment 1; allowed are"));
  run.rollouts();
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 2u * 1);
  EXPECT_EQ(run.pool().stats().num_env_failures, 1u);
  EXPECT_EQ(listener->stats().num_refused, 1u);
  EXPECT_TRUE(contains(listener->events().take().first.at(0).text, "reward: nan"));
  EXPECT_TRUE(
      contains(run.pool().stats().last_error,
               "the environment that has joined from this machine (connection "));
}

TEST_F(JoinRefusalsTest, AnEnvironmentThatRaisesCostsItsStream) {
  auto listener = listen();
  Session run(pool_options(listener));
  RunningClient client(counting(2), client_options(unix_address()));
  run.rollouts();
  CountingEnvironment environment(7, 2);
  {
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.say_hello(hello_of(environment, "bad", 0));
    stream.send(environment.reset());
    stream.send(environment.step(stream.receive()));
    stream.receive();
    stream.send(encode_error("Traceback: it broke"));
    stream.leave();
  }
  run.rollouts();
  EXPECT_EQ(run.pool().stats().num_env_failures, 1u);
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 2u * 1);
  const std::vector<Event> events = run.pool().events().take().first;
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, Event::kEnvError);
  EXPECT_TRUE(contains(events[0].text, "Traceback: it broke"));
  // In place of the hello, it counts too.
  {
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.send(encode_error("no such game"));
    stream.leave();
  }
  EXPECT_EQ(run.pool().stats().num_env_failures, 2u);
  EXPECT_TRUE(contains(listener->events().take().first.at(0).text, "no such game"));
}

// --- Failures of joined environments

TEST_F(JoinRefusalsTest, OneThatRaisesAgainAndAgainEndsNobodysRun) {
  auto listener = listen();
  ActorPoolOptions options = pool_options(listener);
  std::atomic<uint64_t> num_failures{0};
  std::atomic<bool> is_sound{true};  // the other's rollouts speak for it
  options.check = [&](const PoolFacts& facts) {
    EXPECT_LE(facts.peers.size(), 1u) << "they are of one machine";
    for (const auto& [origin, peer] : facts.peers) {
      num_failures += peer.num_failures;
      if (num_failures > 0 && !(peer.is_present && peer.has_delivered)) {
        is_sound = false;
      }
    }
  };
  RunningClient client(counting(2), client_options(unix_address()));
  listener->probe(Milliseconds(60'000));
  Session run(options);
  run.rollouts();
  CountingEnvironment environment(7, 2);
  for (int i = 0; i < 7; ++i) {
    HandMade stream(unix_address());
    stream.expect_hello();
    if (i % 2 == 0) {  // after a step; otherwise in place of the hello
      stream.say_hello(environment.hello());
      stream.send(environment.reset());
      stream.send(environment.step(stream.receive()));
      stream.receive();
    }
    stream.send(encode_error("Traceback: it broke"));
    stream.leave();
    run.rollouts();
  }
  EXPECT_EQ(run.pool().stats().num_env_failures, 7u);
  wait_until([&] { return num_failures == 7; });
  EXPECT_TRUE(is_sound);
}

TEST_F(JoinRefusalsTest, EnvironmentsThatAllRaiseEndTheRun) {
  auto listener = listen();
  ActorPoolOptions options = pool_options(listener);
  options.check = end_after_failures(2);
  Session run(options);
  std::atomic<bool> over{false};
  Threads threads;
  EnvClientOptions client_options = JoinTest::client_options(unix_address());
  client_options.maximum_downtime = Milliseconds(300);
  threads.start([&] {  // gives rollouts before it raises, which is no excuse
    while (!over) {
      EnvClient client([] { return std::make_unique<FailingEnvironment>(7, 2, 12); },
                       client_options);
      try {
        client.run();
      } catch (const std::exception&) {
      }
    }
  });
  const std::string error = error_of<EnvironmentError>([&] {
    while (true) run.rollouts();
  });
  EXPECT_TRUE(contains(error, "it broke in step 12")) << error;
  over = true;
  listener->close();
}

// --- Others than the first

// An environment that has shaken hands, and waits.
class Guest {
 public:
  Guest(const std::string& address, CountingEnvironment* environment)
      : stream_(std::in_place, address), environment_(*environment) {
    stream_->expect_hello();
    try {
      stream_->say_hello(environment_.hello());
      stream_->send(environment_.reset());
    } catch (const TransportError& error) {  // already
      refusal_ = error.what();
    }
  }
  void play(int steps) {
    for (int i = 0; i < steps; ++i)
      stream_->send(environment_.step(stream_->receive()));
  }
  std::string end() { return refusal_.empty() ? stream_->end() : refusal_; }

 private:
  std::string refusal_;
  std::optional<HandMade> stream_;
  CountingEnvironment& environment_;
};

// The client dials again by itself, and has its turn in the next pool.
TEST_F(JoinRefusalsTest, WhoDiffersMayTryAgainUntilTheRunHasLearned) {
  auto listener = listen();
  CountingEnvironment other(1, 2, false);
  ActorPoolOptions options = pool_options(listener);
  Guest stray(unix_address(), &other);
  options.hello = listener->probe(Milliseconds(60'000));
  RunningClient right(counting(2), client_options(unix_address()));
  {
    Session run(options);
    stray.play(kT - 1);  // one less than an unroll
    wait_until([&] { return run.pool().stats().num_different > 1; });
    EXPECT_TRUE(contains(right.client().stats().last_error, "it may try again later"));
  }
  Guest back(unix_address(), &other);
  wait_until([&] { return listener->stats().num_streams == 2; });
  options.hello = listener->probe(Milliseconds(60'000), nullptr, options.hello);
  Session run(options);
  EXPECT_TRUE(contains(back.end(), "is lost: "));
  run.rollouts();
  run.pool().settle();
  Guest late(unix_address(), &other);
  EXPECT_TRUE(contains(late.end(), "refuses: "));
  EXPECT_EQ(run.pool().stats().num_different, 1u);
}

TEST_F(JoinRefusalsTest, ATimeThatCannotBeIsNotCounted) {
  auto listener = listen();
  Session run(pool_options(listener));
  CountingEnvironment environment(1, 2);
  HandMade stream(unix_address());
  stream.expect_hello();
  stream.say_hello(environment.hello());
  const auto said = [](EnvRow row) {
    row.env_nanoseconds = ~uint64_t{0};
    return row;
  };
  stream.send(said(environment.reset()));
  for (int i = 0; i < kT; ++i) stream.send(said(environment.step(stream.receive())));
  run.rollouts();
  const ActorPoolStats stats = run.pool().stats();
  EXPECT_GT(stats.env_seconds, 0);
  EXPECT_LE(stats.env_seconds, stats.env_wait_seconds);
}

TEST_F(JoinRefusalsTest, RefusalsAreShortAndTellNobodyElse) {
  auto listener = listen();
  Session run(pool_options(listener));
  testing::internal::CaptureStderr();
  wire::EnvHello hello = CountingEnvironment(1, 2).hello();
  hello.set_environment("\xff\xfe");  // no UTF-8, which protobuf would print
  {
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.say_hello(hello);
    EXPECT_TRUE(contains(stream.end(), "malformed"));
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");

  ExpectedEnvironment expected;
  expected.settings["env"] = "Counting-v0";
  hello = CountingEnvironment(1, 2).hello();
  for (int i = 0; i < 1000; ++i) {
    wire::Setting& setting = *hello.add_settings();
    setting.set_name("flag" + std::to_string(i));
    setting.set_value(std::string(1000, 'x'));
  }
  const std::string text =
      error_of<RefusedError>([&] { expected.check(hello, "a peer"); });
  EXPECT_TRUE(contains(text, "--flag0 x"));
  EXPECT_LT(text.size(), 2200u);
}

// Its hello has the bounds of 300,000 elements.
class Bounded : public CountingEnvironment {
 public:
  Bounded() : CountingEnvironment(1, 2), hello_(CountingEnvironment::hello()) {
    auto* dict = hello_.mutable_observation_space()->mutable_dict();
    for (int i = 0; i < 5; ++i) {
      dict->add_keys("more" + std::to_string(i));
      wire::Space::Box* box = dict->add_values()->mutable_box();
      box->set_dtype(wire::FLOAT32);
      box->add_shape(60'000);
      for (int j = 0; j < 60'000; ++j) {
        box->add_low(-1.0 - j);
        box->add_high(1.0 + j);
      }
    }
  }
  const wire::EnvHello& hello() const override { return hello_; }

 private:
  wire::EnvHello hello_;
};

TEST_F(JoinRefusalsTest, AnEnvironmentWhoseHelloIsTooLargeSaysSo) {
  auto listener = listen();
  Session run(pool_options(listener));
  EnvClient client([] { return std::make_unique<Bounded>(); },
                   client_options(unix_address()));
  const std::string text = error_of<UnusableEnvironment>([&] { client.run(); });
  EXPECT_TRUE(contains(text, "can't be served: hello: "));
  EXPECT_TRUE(contains(text, "one bound for a whole Box"));
  wait_until([&] { return contains(listener->stats().last_refusal, "one bound"); });
}

}  // namespace
}  // namespace torchbeast
