// Streams of environments that have joined at the pool's listener.

#include <new>
#include <stdexcept>
#include <string>

#include "pool_streams.h"

namespace torchbeast {

// In the stream's thread. The listener notes refusals.
void PoolStreams::serve(Connection& connection, const wire::EnvHello& hello) {
  const TransportError over("this learner is about to end", true);
  try {
    unroll_joined(connection, hello);
  } catch (const Connection::Left&) {
    throw;
  } catch (const RefusedError&) {
    throw;
  } catch (const BusyError&) {
    throw;
  } catch (const WireError& error) {
    note(connection.peer() + " breaks the rules: " + error.what());
    throw;
  } catch (const TooManyBytes& error) {
    throw BusyError(std::string("this learner has no memory for it: ") + error.what());
  } catch (const std::bad_alloc&) {
    throw BusyError("this learner has no memory for a rollout of it");
  } catch (const TransportError& error) {
    if (!closing) {
      note(error.what());
      events.add(Event::kLost, error.what());
    }
    throw;
  } catch (const Stopped&) {
    throw over;
  } catch (const ClosedBatchingQueue&) {
    close();
    throw over;
  } catch (const EnvironmentError& error) {  // it knows, and all was read
    if (closing) return;
    note(error.what());
    events.add(Event::kEnvError, error.what());
    count_failure(error, connection.origin());
  } catch (...) {
    fail(std::current_exception());
    throw std::runtime_error("the run has failed");
  }
}

// Until the environment leaves.
void PoolStreams::unroll_joined(Connection& connection, const wire::EnvHello& hello) {
  Presence presence(this, &connection);
  // Without either, the listener has the measure.
  if (options.hello || !options.addresses.empty()) {
    hellos.check(hello, connection.peer());
  } else {
    options.expected.check(hello, connection.peer());
  }
  const Interrupt interrupt = [this] {
    if (closing || options.listener->is_closed()) throw Stopped();
  };
  EnvSession session(&sessions, &connection, hello, interrupt);
  const uint64_t number = hello.first_step();
  const EnvRow newest = session.read_row();
  UnrollSlots::Lease lease(&*slots, &connection, hello.stream_id(),
                           is_between_episodes(session.spec(), newest.arrays),
                           interrupt);
  if (lease.arrival() == UnrollSlots::Arrival::kFull) {
    throw BusyError("all " + std::to_string(slots->size()) +
                    " places are taken; try again later");
  }
  if (lease.arrival() == UnrollSlots::Arrival::kReplaced) {
    throw TransportError(
        connection.peer() + " was replaced by a newer connection of its own", true);
  }
  presence.connect();
  presence.trust();
  std::unique_ptr<Unroll>& unroll = lease.unroll();
  try {
    switch (lease.arrival()) {
      case UnrollSlots::Arrival::kBegins:
        unroll =
            std::make_unique<Unroll>(&sessions.unrolls, session.spec(), newest, number);
        break;
      case UnrollSlots::Arrival::kTakesOver:
        unroll->hand_over(newest, number);
        break;
      default:  // goes on
        ++num_reconnects;
        events.add(Event::kReturned, connection.peer());
        if (number == unroll->newest_number() + 1) {
          unroll->take(newest);
          presence.prove();
        } else if (number != unroll->newest_number()) {
          throw WireError("hello.first_step is " + std::to_string(number) +
                          ", and this stream_id was at step " +
                          std::to_string(unroll->newest_number()));
        }
        break;
    }
    run_session(session, *unroll, [&](bool finished) {
      presence.prove();
      if (!finished) return;
      presence.deliver();
      if (!options.is_provisional) options.listener->settle(hello);
    });
  } catch (const Connection::Left&) {
    lease.departure = UnrollSlots::Departure::kLeft;
  } catch (const TransportError&) {
    lease.departure = UnrollSlots::Departure::kLost;
    throw;
  } catch (const WireError&) {
    lease.departure = UnrollSlots::Departure::kLost;
    throw;
  } catch (const EnvironmentError&) {
    presence.fail();
    lease.departure = UnrollSlots::Departure::kFailed;
    throw;
  } catch (const std::bad_alloc&) {
    lease.departure = UnrollSlots::Departure::kFailed;
    throw;
  }
}

}  // namespace torchbeast
