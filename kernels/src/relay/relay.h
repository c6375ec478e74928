// A thread that carries requests to workers and their replies to clients, apart from Python.
#pragma once

#include <climits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "relay/job.h"
#include "relay/marks.h"
#include "relay/pool.h"
#include "relay/timers.h"

namespace kv::relay {

// Lifetime: process. Public functions are for one thread, which is not the relay's own.
class Relay {
 public:
  Relay();
  ~Relay() { stop(); }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Takes an order; each gets one end among the marks, whatever happens to it. The client's socket
  // must stay open until that end was taken, or `cancel` called. Throws std::runtime_error once
  // stopped.
  std::shared_ptr<Job> submit(Order order);

  // What a client has of a reply when its request is given up.
  struct Had {
    std::uint64_t written = 0;  // bytes, head included
    bool ends_with_connection = false;
    bool whole = false;
  };

  // Gives a request up. When it returns the client's socket is used no more. A reply that is
  // whole by then stays so: its end is told as if nobody had given it up.
  Had cancel(const std::shared_ptr<Job>& job);

  void set_addresses(const std::shared_ptr<Pool>& pool, std::vector<Address> addresses);

  // Gives up every exchange of the pool whose client has seen nothing yet, and idle connections.
  void abandon_silent(const std::shared_ptr<Pool>& pool);

  // Closes every connection of the pool, those in use too; it takes no more requests. A mark of
  // the number `id` with an end tells when it is done.
  void close(const std::shared_ptr<Pool>& pool, std::uint64_t id);

  // Ends the thread and with it all that is under way. Idempotent.
  void stop();

  Marks& marks() { return marks_; }

 private:
  struct Command {
    enum class Kind : std::uint8_t { submit, cancel, addresses, abandon, close, stop } kind;
    std::shared_ptr<Job> job;
    std::shared_ptr<Pool> pool;
    std::vector<Address> addresses;
    std::uint64_t id = 0;
  };

  // relay.cpp: the thread and what it is told.
  void tell(Command command);
  void run();
  int wait_ms() const;
  void on_event(Source* source, std::uint32_t events);
  void obey();
  void obey(Command& command);
  void abandon(Pool& pool);
  void close_all(const std::shared_ptr<Pool>& pool);
  void fire_timers(double pause_s);
  void late(Job& job);

  // connecting.cpp: connections taken, made and closed.
  void begin(Job& job);
  Connection* take_idle(Pool& pool);
  void connect(Job& job);
  bool try_address(Job& job);
  int open_socket(int family);
  bool drop_longest_idle();
  void on_connecting(Connection& connection);
  void keep(Connection& connection);
  void drop(Connection& connection);
  void watch(Connection& connection, std::uint32_t events);

  // exchange.cpp: one request and its reply on one connection.
  void exchange(Job& job, Connection& connection);
  void send_request(Job& job);
  void on_worker(Connection& connection, std::uint32_t events);
  void on_readable(Connection& connection);
  void on_reply(Job& job, std::string_view data);
  void on_body(Job& job);
  void wait_for_answer(Job& job);
  void forward(Job& job);
  void lost(Connection& connection, bool orderly);
  void end(Job& job, Failure failure);
  void finish(Job& job, Failure failure, bool held_whole);
  void tell_progress(Job& job);

  // client.cpp: the client's side.
  void give(Job& job, std::string_view head, std::string_view data);
  void on_client(Job& job);
  void pause_where_behind(Job& job);
  void give_back_client(Job& job);
  void watch_client(Job& job, bool wanted);

  // Beyond so many open files idle connections are closed; beyond so many none is made: the others
  // are for the process' logs, events, admin port.
  int idle_files_ = INT_MAX, most_files_ = INT_MAX;
  int epoll_ = -1;
  int wake_ = -1;
  Source wake_source_{Source::Kind::wake};
  std::mutex mutex_;  // guards the commands
  std::vector<Command> commands_;
  bool stopping_ = false;
  Marks marks_;

  // Of the thread alone.
  double now_s_ = 0.0;
  double flush_at_s_ = -1.0;  // when marks of progress are announced; below 0: none wait
  bool urgent_ = false;
  Timers timers_;
  std::unordered_map<Job*, std::shared_ptr<Job>> jobs_;
  std::unordered_map<Connection*, std::unique_ptr<Connection>> connections_;
  // Kept until the batch of events is through, which may still name them.
  std::vector<std::shared_ptr<Job>> past_jobs_;
  std::vector<std::unique_ptr<Connection>> past_connections_;
  std::vector<std::shared_ptr<Pool>> pools_;
  std::unique_ptr<char[]> buffer_;

  bool stopped_ = false;
  std::thread thread_;
};

double monotonic_s();

}  // namespace kv::relay
