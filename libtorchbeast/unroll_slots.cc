#include "unroll_slots.h"

#include <utility>

namespace torchbeast {

// No lock is held while an unroll is destroyed.

UnrollSlots::UnrollSlots(size_t number, std::atomic<uint64_t>* num_dropped_steps)
    : num_dropped_steps_(*num_dropped_steps), slots_(number) {}

UnrollSlots::Slot* UnrollSlots::find(const std::string& stream_id) {
  if (stream_id.empty()) return nullptr;
  for (Slot& slot : slots_) {
    if (slot.stream_id == stream_id) return &slot;
  }
  return nullptr;
}

// Gives up the slot's unroll.
std::unique_ptr<Unroll> UnrollSlots::drop(Slot* slot) {
  num_dropped_steps_ += static_cast<uint64_t>(slot->unroll->num_unfinished_steps());
  slot->stream_id.clear();
  slot->handed_over = false;
  return std::move(slot->unroll);
}

// A slot for a stream without one of its own: one that was handed over, a free one, or
// the one that has waited longest; null if all are in use.
UnrollSlots::Slot* UnrollSlots::find_vacant(bool between_episodes,
                                            std::unique_ptr<Unroll>* dropped) {
  Slot* free = nullptr;
  Slot* longest = nullptr;
  for (Slot& slot : slots_) {
    if (slot.connection != nullptr) continue;
    if (slot.unroll == nullptr) {
      free = &slot;
    } else if (slot.handed_over && between_episodes) {
      return &slot;
    } else if (longest == nullptr || slot.since < longest->since) {
      longest = &slot;
    }
  }
  if (free != nullptr || longest == nullptr) return free;
  if (!(between_episodes && longest->unroll->is_between_episodes())) {
    *dropped = drop(longest);
  }
  return longest;
}

void UnrollSlots::expire(Milliseconds maximum_downtime, bool was_suspended) {
  std::vector<std::unique_ptr<Unroll>> dropped;
  MutexLock lock(mutex_);
  const auto now = Clock::now();
  for (Slot& slot : slots_) {
    if (was_suspended) slot.since = now;
    if (slot.connection != nullptr || slot.unroll == nullptr || slot.handed_over ||
        !is_longer(now - slot.since, maximum_downtime)) {
      continue;
    }
    if (slot.unroll->is_between_episodes()) {
      slot.handed_over = true;
    } else {
      dropped.push_back(drop(&slot));
    }
  }
}

// --- A lease

UnrollSlots::Lease::Lease(UnrollSlots* slots, Connection* connection,
                          const std::string& stream_id, bool between_episodes,
                          const Interrupt& interrupt)
    : slots_(*slots) {
  std::unique_ptr<Unroll> dropped;
  MutexLock lock(slots_.mutex_);
  const uint64_t claim = ++slots_.num_claims_;
  while (slot_ == nullptr) {
    Slot* own = slots_.find(stream_id);
    if (own == nullptr) {
      slot_ = slots_.find_vacant(between_episodes, &dropped);
      if (slot_ == nullptr) {
        throw Ended(End::kBusy, "all " + std::to_string(slots_.slots_.size()) +
                                    " places are taken; try again later");
      }
      if (slot_->unroll != nullptr) arrival_ = Arrival::kTakesOver;
    } else if (own->claim > claim) {
      throw TransportError(connection->peer() +
                           " was replaced by a newer connection of its own");
    } else if (own->connection == nullptr) {
      slot_ = own;
      arrival_ = Arrival::kGoesOn;
    } else {
      own->claim = claim;
      own->connection->cancel("was replaced by a newer connection of its own");
      slots_.changed_.wait_until(slots_.mutex_, Clock::now() + kLookPeriod, interrupt);
    }
  }
  slot_->stream_id = stream_id;
  slot_->claim = claim;
  slot_->connection = connection;
  slot_->handed_over = false;
}

UnrollSlots::Lease::~Lease() {
  std::unique_ptr<Unroll> dropped;
  {
    MutexLock lock(slots_.mutex_);
    Slot& slot = *slot_;
    slot.connection = nullptr;
    slot.since = Clock::now();
    const bool is_lost = end == End::kLost || end == End::kBrokeRules;
    if (slot.unroll == nullptr || end == End::kOver || end == End::kFailed) {
      slot.stream_id.clear();
      dropped = std::move(slot.unroll);
    } else if (is_lost || end == End::kLeft) {
      const bool comes_back = is_lost && !slot.stream_id.empty();
      slot.handed_over = !comes_back && slot.unroll->is_between_episodes();
      // One that leaves in the middle of an episode counts as lost.
      if (slot.stream_id.empty() && !slot.handed_over) dropped = slots_.drop(&slot);
    } else {
      dropped = slots_.drop(&slot);
    }
  }
  slots_.changed_.notify_all();
}

}  // namespace torchbeast
