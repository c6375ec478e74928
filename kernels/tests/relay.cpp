// Drives the relay's thread over real sockets, without Python, for the sanitizers (sanitize.sh
// builds and runs it): workers that answer in every way there is, clients that leave.
//   relay [ROUNDS] [SEED]   each round a relay of its own; exit 1 where an account is wrong
#include "relay/relay.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

using kv::relay::Address;
using kv::relay::Fault;
using kv::relay::JournalTerms;
using kv::relay::Mark;
using kv::relay::Order;
using kv::relay::Pool;
using kv::relay::Relay;

namespace {

[[noreturn]] void fail(const char* what, std::uint64_t seed) {
  std::fprintf(stderr, "%s (seed %llu)\n", what, static_cast<unsigned long long>(seed));
  std::exit(1);
}

void say(int fd, const std::string& text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const ssize_t size = ::send(fd, text.data() + at, text.size() - at, MSG_NOSIGNAL);
    if (size <= 0) return;
    at += static_cast<std::size_t>(size);
  }
}

// An event with a token of the answer, and the prompt's.
const char* const kToken =
    "data: {\"choices\":[{\"text\":\"x\",\"token_ids\":[7],\"prompt_token_ids\":[1,2]}]}\n\n";

std::string chunk_of(const std::string& event) {
  char size[20];
  std::snprintf(size, sizeof size, "%zx\r\n", event.size());
  return size + event + "\r\n";
}

// A worker on a free port of loopback. What it answers is the first letter of the request's body.
class Worker {
 public:
  Worker() : listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof name;
    auto* any = reinterpret_cast<sockaddr*>(&name);
    if (::bind(listener_, any, size) != 0 || ::listen(listener_, 64) != 0) std::abort();
    ::getsockname(listener_, any, &size);
    port = ntohs(name.sin_port);
    accepting_ = std::thread([this] {
      for (int fd = ::accept(listener_, nullptr, nullptr); fd >= 0;
           fd = ::accept(listener_, nullptr, nullptr)) {
        serving_.emplace_back([fd] { serve(fd); });
      }
    });
  }

  ~Worker() {
    ::shutdown(listener_, SHUT_RDWR);
    accepting_.join();
    ::close(listener_);
    for (std::thread& one : serving_) one.join();
  }

  std::uint16_t port = 0;

 private:
  static void serve(int fd) {
    std::string got;
    char data[65'536];
    for (;;) {
      const std::size_t end = got.find("\r\n\r\n");
      const std::size_t wanted =
          end == std::string::npos
              ? 0
              : end + 4 + std::strtoul(got.c_str() + got.find("Length: ") + 8, nullptr, 10);
      if (wanted != 0 && got.size() >= wanted) {
        const char how = got[end + 4];
        got.erase(0, wanted);
        if (!answer(fd, how)) break;
        continue;
      }
      const ssize_t size = ::recv(fd, data, sizeof data, 0);
      if (size <= 0) break;
      got.append(data, static_cast<std::size_t>(size));
    }
    ::close(fd);
  }

  static bool answer(int fd, char how) {
    const std::string events =
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    char one = 0;
    switch (how) {
      case 'l': say(fd, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"); return true;
      case 'c':
        say(fd, events);
        for (int i = 0; i < 50; ++i) say(fd, "9\r\ndata: 1\n\n\r\n");
        say(fd, "0\r\n\r\n");
        return true;
      case 'b':  // more than the sockets hold
        say(fd, events);
        for (int i = 0; i < 100; ++i) say(fd, "10000\r\n" + std::string(65'536, 'x') + "\r\n");
        say(fd, "0\r\n\r\n");
        return true;
      case 'm':  // token by token, to the end
      case 'd':  // or until it dies, in the middle of an event
        say(fd, events);
        for (int i = 0; i < 20; ++i) say(fd, chunk_of(kToken));
        if (how == 'd') {
          say(fd, chunk_of(kToken).substr(0, 30));
          return false;
        }
        say(fd, chunk_of("data: [DONE]\n\n") + "0\r\n\r\n");
        return true;
      case '5': say(fd, "HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"); return true;
      case 'e': say(fd, "HTTP/1.1 200 OK\r\n\r\nuntil the end"); return false;
      case 'g': say(fd, events + "9\r\ndata: 1\n\n\r\nzz\r\n"); return false;
      case 's': (void)::recv(fd, &one, 1, 0); return false;  // silent until given up
      default: return false;
    }
  }

  int listener_;
  std::thread accepting_;
  std::vector<std::thread> serving_;
};

// What one client reads, on a thread of its own; some stop reading and leave.
struct Client {
  explicit Client(bool leaves) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) std::abort();
    theirs = ends[1];
    reading = std::thread([this, fd = ends[0], leaves] {
      char data[65'536];
      for (ssize_t size = 1; size > 0 && !(leaves && got > 0);) {
        size = ::recv(fd, data, sizeof data, 0);
        if (size > 0) got += static_cast<std::uint64_t>(size);
      }
      ::close(fd);
    });
  }

  int theirs;
  std::atomic<std::uint64_t> got{0};
  std::thread reading;
};

struct Asked {
  std::unique_ptr<Client> client;
  std::shared_ptr<kv::relay::Job> job;
  std::string body;
  bool by_events = false, kept = false, leaves = false;
  bool cancelled = false, whole = false, ended = false;
  std::uint64_t expected = 0;
  int stranger = -1;  // the other end of who has the client's number since it was given up
};

class Round {
 public:
  explicit Round(std::uint64_t seed) : seed_(seed), dice_(seed) {
    kv::relay::Limits limits;
    limits.max_connections = 1 + dice_() % 8;
    limits.progress_s = 0.001;
    pool_ = std::make_shared<Pool>(limits);
    relay_.set_addresses(pool_, {kv::relay::address_of("127.0.0.1", worker_.port)});
  }

  void run() {
    for (int i = 0; i < 40; ++i) {
      ask();
      if (dice_() % 4 == 0) cancel_one();
      if (dice_() % 16 == 0) relay_.abandon_silent(pool_);
      take(0);
    }
    for (auto& [id, asked] : asked_) {
      if (asked.body[0] == 's') cancel(asked);
    }
    const bool stop_first = dice_() % 4 == 0;
    if (stop_first) relay_.stop();
    while (open_ != 0) take(10'000);
    if (!stop_first) {
      relay_.close(pool_, ++last_id_);
      while (!closed_) take(10'000);
    }
    if (pool_->open != 0 || pool_->idle_count != 0) fail("connections are left", seed_);
    relay_.stop();
    for (auto& [id, asked] : asked_) check(asked);
    asked_.clear();
    if (terms_->room->taken() != 0) fail("room for ids is left taken", seed_);
  }

 private:
  void ask() {
    Asked asked;
    asked.leaves = dice_() % 8 == 0;
    asked.client = std::make_unique<Client>(asked.leaves);
    asked.body = std::string(1, "lcb5egshmd"[dice_() % 10]) + std::string(dice_() % 300'000, 'y');
    Order order;
    order.id = ++last_id_;
    order.pool = pool_;
    order.head = "POST / HTTP/1.1\r\nContent-Length: " + std::to_string(asked.body.size()) +
                 "\r\n\r\n";
    asked.kept = dice_() % 6 == 0;  // nobody's: its end has it
    order.client_fd = asked.kept ? -1 : asked.client->theirs;
    order.client_buffer_bytes = 65'536;
    order.timeouts.client_s = 20;
    order.tells = true;
    if (!asked.kept && dice_() % 3 != 0) order.journal = terms_;
    asked.by_events = order.journal != nullptr && std::string("cbgmd").find(asked.body[0]) < 5;
    Asked& kept = asked_.emplace(order.id, std::move(asked)).first->second;
    order.body = kept.body;
    ++open_;
    kept.job = relay_.submit(std::move(order));
  }

  void cancel_one() {
    auto one = asked_.begin();
    std::advance(one, static_cast<long>(dice_() % asked_.size()));
    cancel(one->second);
  }

  void cancel(Asked& asked) {
    if (asked.ended || asked.cancelled) return;
    asked.cancelled = true;
    asked.whole = relay_.cancel(asked.job).whole;
    // From here on its number is somebody else's, who must not get a byte.
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) std::abort();
    if (::dup2(ends[1], asked.client->theirs) < 0) std::abort();
    ::close(ends[1]);
    asked.stranger = ends[0];
  }

  void take(int wait_ms) {
    pollfd ready{relay_.marks().fd(), POLLIN, 0};
    if (wait_ms != 0 && ::poll(&ready, 1, wait_ms) == 0) fail("no end came", seed_);
    for (const Mark& mark : relay_.marks().take()) {
      if (mark.end == nullptr) continue;
      const auto found = asked_.find(mark.job);
      if (found == asked_.end()) {
        closed_ = true;
        continue;
      }
      Asked& asked = found->second;
      if (asked.ended) fail("a second end came", seed_);
      asked.ended = true;
      --open_;
      const auto& end = *mark.end;
      asked.expected = end.written - end.unsent.size();
      const bool whole = end.failure.fault == Fault::none;
      if (asked.whole && !whole) fail("a whole reply was given up", seed_);
      const bool given = end.bytes_to_client != 0;
      if (whole && end.status == 200 && given == asked.kept) fail("it went elsewhere", seed_);
      const auto* journal = end.journal.get();
      if (journal != nullptr && !asked.by_events) fail("no stream was asked for", seed_);
      const bool spoke = journal != nullptr && whole && asked.body[0] == 'm';
      if (spoke && journal->said().size() != 20) fail("ids are missing", seed_);
      if (whole && asked.body[0] == 'g') fail("garbage was taken", seed_);
      const bool failed = asked.body[0] == '5' && end.status == 503;
      if (end.held != (failed || (asked.kept && whole))) fail("held, or not, by mistake", seed_);
      if (asked.kept && (end.written != 0 || end.held_body.size() > 65'536)) fail("kept", seed_);
    }
  }

  void check(Asked& asked) {
    ::close(asked.client->theirs);
    asked.client->reading.join();
    char byte = 0;
    const bool told = asked.stranger >= 0 && ::recv(asked.stranger, &byte, 1, MSG_DONTWAIT) > 0;
    if (asked.stranger >= 0) ::close(asked.stranger);
    if (told) fail("somebody else got a client's bytes", seed_);
    if (!asked.leaves && !asked.cancelled && asked.client->got > asked.expected) {
      fail("a client has more than was told", seed_);
    }
  }

  std::uint64_t seed_;
  std::mt19937_64 dice_;
  Worker worker_;
  Relay relay_;
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<JournalTerms> terms_ = std::make_shared<JournalTerms>(
      JournalTerms{std::make_shared<kv::relay::TokenRoom>(1'000, 100'000), "", "X: 1\r\n"});
  std::map<std::uint64_t, Asked> asked_;
  std::uint64_t last_id_ = 0;
  int open_ = 0;
  bool closed_ = false;
};

}  // namespace

int main(int count, char** arguments) {
  const long rounds = count > 1 ? std::strtol(arguments[1], nullptr, 10) : 10;
  std::uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  for (long i = 0; i < rounds; ++i, ++seed) Round(seed).run();
  std::printf("%ld rounds\n", rounds);
  return 0;
}
