// Places for environments that dial the learner: each holds one unroll, also while its
// environment is away.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "connection.h"
#include "sync.h"
#include "unroll.h"

namespace torchbeast {

class Places {
 private:
  struct Place {
    std::string stream_id;             // of who is there, or was last
    uint64_t claim = 0;                // the latest Seat that wants it
    Connection* connection = nullptr;  // null: nobody is there
    bool handed_over = false;          // nobody is there, and anybody may go on
    Clock::time_point since;           // when nobody was there any more
    // Belongs to who is there. Null: free.
    std::unique_ptr<Unroll> unroll;
  };

 public:
  // Steps of unrolls that are given up are added to *num_dropped_steps.
  Places(size_t number, std::atomic<uint64_t>* num_dropped_steps);

  // Who joins sits down with an own `stream_id`, which may be empty:
  enum class Arrival {
    kGoesOn,    // in its own unroll; an older connection of it is cancelled before
    kTakesOver  // the unroll of one who has left between episodes
    ,
    kBegins  // a new one
  };
  enum class Departure {
    kLost,    // may come back
    kLeft,    // will not
    kFailed,  // will not, and its unroll is dropped
    kOver     // nobody will: the run ends
  };
  class Seat {
   public:
    // `between_episodes`: whether it begins new episodes. Waits for an older connection
    // of the same name to be gone. Throws Refusal if all places are taken,
    // TransportError if another connection of this name comes meanwhile.
    Seat(Places* places, Connection* connection, const std::string& stream_id,
         bool between_episodes, const Interrupt& interrupt);
    ~Seat();
    Seat(const Seat&) = delete;

    Arrival arrival() const { return arrival_; }
    std::unique_ptr<Unroll>& unroll() { return place_->unroll; }
    // How it ends.
    Departure departure = Departure::kOver;

   private:
    Places& places_;
    Place* place_ = nullptr;
    Arrival arrival_ = Arrival::kBegins;
  };

  // Gives up what was lost so long ago: whoever comes may go on where all episodes had
  // ended, the rest is dropped.
  void expire(Milliseconds maximum_downtime) TB_EXCLUDES(mutex_);

 private:
  Place* find(const std::string& stream_id) TB_REQUIRES(mutex_);
  Place* find_vacant(bool between_episodes, std::unique_ptr<Unroll>* dropped)
      TB_REQUIRES(mutex_);
  std::unique_ptr<Unroll> drop(Place* place) TB_REQUIRES(mutex_);

  std::atomic<uint64_t>& num_dropped_steps_;
  Mutex mutex_;
  CondVar changed_;
  uint64_t num_claims_ TB_GUARDED_BY(mutex_) = 0;
  std::vector<Place> places_ TB_GUARDED_BY(mutex_);  // as many as at the beginning
};

}  // namespace torchbeast
