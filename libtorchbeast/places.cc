#include "places.h"

#include <utility>

#include "stream_server.h"

namespace torchbeast {

// No lock is held while an unroll is destroyed.

Places::Places(size_t number, std::atomic<uint64_t>* num_dropped_steps)
    : num_dropped_steps_(*num_dropped_steps), places_(number) {}

Places::Place* Places::find(const std::string& stream_id) {
  if (stream_id.empty()) return nullptr;
  for (Place& place : places_) {
    if (place.stream_id == stream_id) return &place;
  }
  return nullptr;
}

// Gives up a place's unroll.
std::unique_ptr<Unroll> Places::drop(Place* place) {
  num_dropped_steps_ += static_cast<uint64_t>(place->unroll->num_unfinished_steps());
  place->stream_id.clear();
  place->handed_over = false;
  return std::move(place->unroll);
}

// A place for a stream without one of its own: one that was handed over, a free one, or
// the one that has waited longest; null if somebody is at all of them.
Places::Place* Places::find_vacant(bool between_episodes,
                                   std::unique_ptr<Unroll>* dropped) {
  Place* free = nullptr;
  Place* longest = nullptr;
  for (Place& place : places_) {
    if (place.connection != nullptr) continue;
    if (place.unroll == nullptr) {
      free = &place;
    } else if (place.handed_over && between_episodes) {
      return &place;
    } else if (longest == nullptr || place.since < longest->since) {
      longest = &place;
    }
  }
  if (free != nullptr || longest == nullptr) return free;
  if (!(between_episodes && longest->unroll->is_between_episodes())) {
    *dropped = drop(longest);
  }
  return longest;
}

void Places::expire(Milliseconds maximum_downtime) {
  std::vector<std::unique_ptr<Unroll>> dropped;
  MutexLock lock(mutex_);
  const auto latest = Clock::now() - maximum_downtime;
  for (Place& place : places_) {
    if (place.connection != nullptr || place.unroll == nullptr || place.handed_over ||
        place.since > latest) {
      continue;
    }
    if (place.unroll->is_between_episodes()) {
      place.handed_over = true;
    } else {
      dropped.push_back(drop(&place));
    }
  }
}

// --- A seat
// ---------------------------------------------------------------------------

Places::Seat::Seat(Places* places, Connection* connection, const std::string& stream_id,
                   bool between_episodes, const Interrupt& interrupt)
    : places_(*places) {
  std::unique_ptr<Unroll> dropped;
  MutexLock lock(places_.mutex_);
  const uint64_t claim = ++places_.num_claims_;
  while (place_ == nullptr) {
    Place* own = places_.find(stream_id);
    if (own == nullptr) {
      place_ = places_.find_vacant(between_episodes, &dropped);
      if (place_ == nullptr) {
        throw Refusal{{grpc::StatusCode::RESOURCE_EXHAUSTED,
                       "all " + std::to_string(places_.places_.size()) +
                           " places are taken; try again later"}};
      }
      if (place_->unroll != nullptr) arrival_ = Arrival::kTakesOver;
    } else if (own->claim > claim) {
      throw TransportError(
          connection->peer() + " was replaced by a newer connection of its own", true);
    } else if (own->connection == nullptr) {
      place_ = own;
      arrival_ = Arrival::kGoesOn;
    } else {
      own->claim = claim;
      own->connection->cancel("was replaced by a newer connection of its own");
      places_.changed_.wait_until(places_.mutex_, Clock::now() + kLookPeriod,
                                  interrupt);
    }
  }
  place_->stream_id = stream_id;
  place_->claim = claim;
  place_->connection = connection;
  place_->handed_over = false;
}

Places::Seat::~Seat() {
  std::unique_ptr<Unroll> dropped;
  {
    MutexLock lock(places_.mutex_);
    Place& place = *place_;
    place.connection = nullptr;
    place.since = Clock::now();
    if (place.unroll == nullptr || departure == Departure::kOver) {
      place.stream_id.clear();
      dropped = std::move(place.unroll);
    } else if (departure == Departure::kFailed) {
      dropped = places_.drop(&place);
    } else {
      const bool comes_back = departure == Departure::kLost && !place.stream_id.empty();
      place.handed_over = !comes_back && place.unroll->is_between_episodes();
      // Who leaves in the middle of an episode counts as lost.
      if (place.stream_id.empty() && !place.handed_over) dropped = places_.drop(&place);
    }
  }
  places_.changed_.notify_all();
}

}  // namespace torchbeast
