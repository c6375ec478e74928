// What the relay tells Python: queued by its thread, taken in batches, announced by an eventfd.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "relay/journal.h"
#include "relay/terms.h"

namespace kv::relay {

// What became of one request. Times are seconds of CLOCK_MONOTONIC, below 0: never.
struct End {
  Failure failure;
  int status = 0;  // 0: no reply's head came
  std::uint64_t bytes_to_client = 0;
  double started_s = -1.0, first_byte_s = -1.0, last_byte_s = -1.0;
  std::uint64_t events = 0;
  std::string usage;                 // JSON from the brace of the last usage object on
  const char* flaw = "";  // why a reply that came whole is a failure of its worker all the same
  bool stale = false;                // a kept connection was closed, and it was to be sent once
  bool refused = false;              // it tells of an error that its client caused
  bool held = false;                 // the two below are a reply for which another may do better
  std::string held_head, held_body;
  // Of the client's side: what it got, head included, and what it is still to get.
  std::string reason;
  bool persistent = false;
  bool ends_with_connection = false;
  std::uint64_t written = 0;
  std::string unsent;
  // Of a stream by events: what there is to go on from.
  std::shared_ptr<Journal> journal;
};

struct Mark {
  std::uint64_t job = 0;
  double at_s = 0.0;
  int status = 0;  // above 0: of the first byte's mark
  std::uint64_t events = 0;
  std::unique_ptr<End> end;
};

// Lifetime: process.
class Marks {
 public:
  Marks();
  ~Marks();
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;

  int fd() const { return fd_; }  // readable when there is something to take

  // Where a job's mark of progress waits, so that a later one takes its place.
  struct Place {
    std::uint64_t batch = 0;
    std::size_t index = 0;
  };

  void push(Mark mark);
  void progress(std::uint64_t job, double at_s, std::uint64_t events, Place& place);

  // Announces what was pushed; once, until it is taken.
  void announce();

  std::vector<Mark> take();

 private:
  int fd_;
  std::mutex mutex_;
  std::vector<Mark> marks_;
  std::uint64_t batch_ = 1;
  bool announced_ = false;
};

}  // namespace kv::relay
