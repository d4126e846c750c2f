// A thread that another object keeps.

#pragma once

#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

namespace torchbeast {

// Waits for its thread when it ends. One thread at a time.
class Thread {
 public:
  Thread() = default;
  // Calls f() in a new thread; f must not throw. Throws std::runtime_error if the
  // system refuses one: so members that tell of the thread are set after this.
  template <typename F>
  explicit Thread(F&& f) try : thread_(std::forward<F>(f)) {
  } catch (const std::system_error& error) {
    throw std::runtime_error(
        "the system refuses a thread: " + error.code().message() +
        ". End other programs, or raise the limits of processes (ulimit -u) and of "
        "memory");
  }
  ~Thread() { join(); }
  Thread(Thread&&) = default;
  Thread& operator=(Thread&& other) noexcept {
    join();
    thread_ = std::move(other.thread_);
    return *this;
  }

  // Waits for it. In the thread itself, and without one, it returns at once.
  void join() noexcept {
    if (!thread_.joinable()) return;
    if (thread_.get_id() == std::this_thread::get_id()) return thread_.detach();
    thread_.join();
  }
  // Lets it go on alone.
  void detach() { thread_.detach(); }

 private:
  std::thread thread_;
};

}  // namespace torchbeast
