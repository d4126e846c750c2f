// Streams of environments that have joined at the pool's listener.

#include <memory>
#include <string>

#include "collector.h"
#include "pool_streams.h"

namespace torchbeast {

// In the stream's thread. The listener notes refusals.
End PoolStreams::serve(Connection& connection, const wire::EnvHello& hello) {
  End end = end_of([&] { return unroll_joined(connection, hello); });
  switch (end.kind) {
    case End::kBrokeRules:
      note(connection.peer() + " breaks the rules: " + end.text);
      break;
    case End::kNoMemory:
      end.text = "this learner has no memory for it: " + end.text;
      break;
    case End::kLost:
      if (is_closing()) break;
      note(end.text);
      events.add(Event::kLost, end.text);
      break;
    case End::kRaised:
      if (is_closing()) break;
      note(end.text);
      events.add(Event::kEnvError, end.text);
      count_failure(end.text, connection.origin());
      break;
    case End::kFailed:
      this->end(end.error);
      end.text = "the run has failed";
      break;
    default:
      break;
  }
  return end;
}

End PoolStreams::unroll_joined(Connection& connection, const wire::EnvHello& hello) {
  Presence presence(this, &connection);
  const Interrupt interrupt = [this] {
    if (is_closing() || options.listener->is_closed()) throw_over();
  };
  EnvSession session(&sessions, &connection, hello, interrupt);
  // After the session has checked the rules: all others must be as the first.
  hellos.check(hello, connection.peer(), true);
  const uint64_t number = hello.first_step();
  const EnvRow newest = session.read_row();
  UnrollSlots::Lease lease(&*slots_, &connection, hello.stream_id(),
                           is_between_episodes(session.spec(), newest.arrays),
                           interrupt);
  presence.connect();
  presence.trust();
  std::unique_ptr<Unroll>& unroll = lease.unroll();
  End end = end_of([&] {
    switch (lease.arrival()) {
      case UnrollSlots::Arrival::kBegins:
        unroll =
            std::make_unique<Unroll>(&sessions.unrolls, session.spec(), newest, number);
        break;
      case UnrollSlots::Arrival::kTakesOver:
        unroll->hand_over(newest, number);
        break;
      case UnrollSlots::Arrival::kGoesOn:
        note_return(connection);
        if (number == unroll->newest_number() + 1) {
          unroll->take(newest);
          presence.step(false);
        } else if (number != unroll->newest_number()) {
          throw WireError("hello.first_step is " + std::to_string(number) +
                          ", and this stream_id was at step " +
                          std::to_string(unroll->newest_number()));
        }
        break;
    }
    run_session(session, *unroll, [&](bool finished) { presence.step(finished); });
  });
  // What a run leaves unfinished when it ends was not lost.
  lease.end = is_closing() ? End::kOver : end.kind;
  if (end.kind == End::kBrokeRules && !is_closing()) {
    presence.fail();
    count_failure(connection.peer() + " breaks the rules: " + end.text,
                  connection.origin());
  }
  return end;
}

}  // namespace torchbeast
