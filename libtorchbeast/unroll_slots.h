// Slots for environments that dial the learner. A slot keeps the unroll while its
// environment is away.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "connection.h"
#include "end.h"
#include "sync.h"
#include "unroll.h"

namespace torchbeast {

// Thread-safe. Owns the unrolls.
class UnrollSlots {
  struct Slot;

 public:
  // Steps of unrolls that are given up are added to *num_dropped_steps.
  UnrollSlots(size_t number, std::atomic<uint64_t>* num_dropped_steps);

  // How an environment with this stream_id begins. The id may be empty.
  enum class Arrival {
    kBegins,    // with a new unroll, which it has to make
    kGoesOn,    // in its own unroll; an older connection of it was cancelled
    kTakesOver  // in the unroll of one that has left between episodes
  };
  // One connection's hold on a slot. One thread at a time.
  class Lease {
   public:
    // `between_episodes`: whether it begins new episodes. Waits until an older
    // connection of the same id has gone. Throws what `interrupt` throws, kBusy if all
    // slots are taken, and kLost if a newer connection of the same id has come.
    Lease(UnrollSlots* slots, Connection* connection, const std::string& stream_id,
          bool between_episodes, const Interrupt& interrupt);
    ~Lease();
    Lease(const Lease&) = delete;

    Arrival arrival() const { return arrival_; }
    std::unique_ptr<Unroll>& unroll() { return slot_->unroll; }
    // How it ends: one that is lost or breaks a rule may come back and go on in its
    // unroll, one that leaves hands it over if it is between episodes.
    End::Kind end = End::kOver;

   private:
    UnrollSlots& slots_;
    Slot* slot_ = nullptr;
    Arrival arrival_ = Arrival::kBegins;
  };

  // Gives up the unrolls of environments that were lost so long ago: any other may go
  // on if all episodes had ended; otherwise the unroll is dropped.
  // If this process was suspended, the time begins anew.
  void expire(Milliseconds maximum_downtime, bool was_suspended) TB_EXCLUDES(mutex_);

 private:
  struct Slot {
    std::string stream_id;             // of the environment that has it, or had it last
    uint64_t claim = 0;                // the latest Lease that wants it
    Connection* connection = nullptr;  // null: the environment is away
    bool handed_over = false;          // it is away, and any other may go on
    Clock::time_point since;           // when it went away
    // Belongs to the lease while there is one. Null: the slot is free.
    std::unique_ptr<Unroll> unroll;
  };

  Slot* find(const std::string& stream_id) TB_REQUIRES(mutex_);
  Slot* find_vacant(bool between_episodes, std::unique_ptr<Unroll>* dropped)
      TB_REQUIRES(mutex_);
  std::unique_ptr<Unroll> drop(Slot* slot) TB_REQUIRES(mutex_);

  std::atomic<uint64_t>& num_dropped_steps_;
  Mutex mutex_;
  CondVar changed_;
  uint64_t num_claims_ TB_GUARDED_BY(mutex_) = 0;
  std::vector<Slot> slots_;  // its size never changes; slots are guarded by mutex_
};

}  // namespace torchbeast
