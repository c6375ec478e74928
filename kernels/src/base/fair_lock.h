// A lock that readers share, first come first served: look-ups in a tight loop cannot keep a
// writer out, nor a writer with much to do the look-ups.
#pragma once

#include <atomic>
#include <cstdint>
#include <shared_mutex>

namespace kv {

class FairLock {
 public:
  void lock() {
    const Turn turn(*this);
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }

  void lock_shared() {
    const Turn turn(*this);
    mutex_.lock_shared();
  }
  void unlock_shared() { mutex_.unlock_shared(); }

 private:
  // Who asks takes a number and waits for it; it is the next one's turn when the lock is had.
  class Turn {
   public:
    explicit Turn(FairLock& lock) : lock_(lock) {
      const std::uint32_t mine = lock_.next_.fetch_add(1, std::memory_order_relaxed);
      for (;;) {
        const std::uint32_t now = lock_.serving_.load(std::memory_order_acquire);
        if (now == mine) return;
        lock_.serving_.wait(now, std::memory_order_acquire);
      }
    }
    ~Turn() {
      lock_.serving_.fetch_add(1, std::memory_order_release);
      lock_.serving_.notify_all();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    FairLock& lock_;
  };

  std::shared_mutex mutex_;
  std::atomic<std::uint32_t> next_{0};
  std::atomic<std::uint32_t> serving_{0};
};

}  // namespace kv
