// Moments at which something is too late, one for each job, cheap to move on every event.
#pragma once

#include <cstdint>
#include <map>

namespace kv::relay {

struct Job;

// Lifetime: process. A later moment is only noted: the entry, once due, looks again and moves on.
class Timers {
 public:
  using Entries = std::multimap<double, Job*>;

  // A job's part of it.
  struct Deadline {
    double at_s = 0.0;
    bool set = false;
    Entries::iterator entry;
  };

  void start(Job* job, Deadline& deadline, double at_s) {
    stop(deadline);
    deadline.at_s = at_s;
    deadline.entry = entries_.emplace(at_s, job);
    deadline.set = true;
  }

  // Not sooner than before.
  static void push(Deadline& deadline, double at_s) { deadline.at_s = at_s; }

  void stop(Deadline& deadline) {
    if (deadline.set) entries_.erase(deadline.entry);
    deadline.set = false;
  }

  bool empty() const { return entries_.empty(); }
  double next_s() const { return entries_.begin()->first; }
  Job* next() const { return entries_.begin()->second; }

 private:
  Entries entries_;
};

}  // namespace kv::relay
