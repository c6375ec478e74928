// A load that costs next to nothing: one thread, many connections, every answer checked.
//
//   load --port N[,N...] [--conns 64] [--rate 0] [--ramp-s 0] [--warmup-s 1] [--seconds 3]
//        [--count 0] [--bytes 2048] [--ids 0] [--chat 0] [--stream 0] [--events 16] [--distinct 64]
//        [--shared 0.25] [--unique 0] [--session 0] [--model bench] [--dump 0]
//        [--words FILE]
//
// Without a rate, each connection asks anew as soon as it was answered (closed loop); connections
// begin spread over `ramp-s`. With one, requests begin at that pace whatever the answers do, and
// wait for one of `conns` connections if they must, which counts as their latency (open loop).
// `count` ends after so many requests, all of them measured. `unique` makes every prompt one of
// a kind, `session` gives each of the distinct ones its session's id. Several ports share
// connections and requests evenly; each prompt comes to all of them. `words` is a file of text
// without quotes, backslashes and control characters that prompts are cut from.
// Prints `start` and `stop` at the ends of the measured time, then one line of JSON.
#include <arpa/inet.h>
#include <fcntl.h>

#include <deque>
#include <fstream>
#include <iterator>

#include "answers.h"
#include "bodies.h"
#include "wire.h"

namespace {

using std::uint64_t;

struct Connection {
  int fd = -1;
  bool busy = false;
  wire::Inbox in;
  Answer answer;
  std::string out;  // what the socket did not take yet
  uint64_t began_ns = 0, last_ns = 0;
};

// Exact percentiles of microseconds.
std::string percentiles(std::vector<float>& us, bool dump) {
  std::sort(us.begin(), us.end());
  const auto at = [&](double share) {
    return us.empty() ? 0.0 : us[std::min(us.size() - 1, std::size_t(share * double(us.size())))];
  };
  char text[256];
  std::snprintf(text, sizeof text,
                "{\"count\":%zu,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"p999\":%.1f,\"max\":%.1f",
                us.size(), at(0.5), at(0.9), at(0.99), at(0.999), at(1.0));
  std::string json = text;
  if (dump) {
    json += ",\"all\":[";
    for (const float value : us) json += (json.back() == '[' ? "" : ",") + std::to_string(value);
    json += "]";
  }
  return json + "}";
}

class Load {
 public:
  explicit Load(std::map<std::string, std::string> flags)
      : ports_(ports_of(flags["port"])),
        rate_(std::stod(flags["rate"])),
        ramp_s_(std::stod(flags["ramp-s"])),
        warmup_s_(std::stod(flags["warmup-s"])),
        seconds_(std::stod(flags["seconds"])),
        count_(long(wire::number(flags["count"]))),
        unique_(flags["unique"] != "0"),
        dump_(flags["dump"] != "0"),
        kind_{wire::number(flags["bytes"]), flags["ids"] != "0", flags["chat"] != "0",
              flags["stream"] != "0", long(wire::number(flags["events"])),
              int(wire::number(flags["distinct"])), std::stod(flags["shared"]),
              flags["session"] != "0", words_of(flags["words"])},
        requests_(bodies::make(kind_, flags["model"])),
        poller_(wire::begin()),
        connections_(std::size_t(wire::number(flags["conns"]))),
        idle_(ports_.size()),
        opened_at_(ports_.size()) {}

  void run() {
    begin_ns_ = wire::now_ns();
    start_ns_ = begin_ns_ + (count_ > 0 ? 0 : uint64_t(warmup_s_ * 1e9));
    stop_ns_ = count_ > 0 ? ~uint64_t{0} : start_ns_ + uint64_t(seconds_ * 1e9);
    std::vector<epoll_event> events(512);
    while (!over_) {
      const int count = wire::wait(poller_, events, next_ns());
      for (int i = 0; i < count; ++i) happened(events[i].data.fd, events[i].events);
      const uint64_t now = wire::now_ns();
      if (!measuring_ && now >= start_ns_) {
        measuring_ = true;
        mark("start");
        measured_from_ns_ = now;
      }
      over_ = over_ || now >= stop_ns_;
      if (!over_) begin_due(now);
    }
    mark("stop");
    report(double(wire::now_ns() - measured_from_ns_) / 1e9);
  }

 private:
  static std::vector<int> ports_of(std::string_view list) {
    std::vector<int> ports;
    for (;;) {
      ports.push_back(int(wire::number(list.substr(0, list.find(',')))));
      if (list.find(',') == list.npos) return ports;
      list.remove_prefix(list.find(',') + 1);
    }
  }

  static std::string words_of(const std::string& file) {
    if (file.empty()) return {};
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  static void mark(const char* what) {
    std::printf("%s\n", what);
    std::fflush(stdout);
  }

  // When something is to be begun, or the phase ends.
  uint64_t next_ns() const {
    uint64_t next = measuring_ ? stop_ns_ : start_ns_;
    if (rate_ > 0)
      next = std::min(next, due_ns(begun_));
    else if (opened_ < connections_.size())
      next = std::min(next, open_ns(opened_));
    return std::min(next, wire::now_ns() + 1'000'000'000u);
  }
  uint64_t due_ns(long serial) const {
    return begin_ns_ + uint64_t(double(serial) / rate_ * 1e9);
  }
  uint64_t open_ns(std::size_t serial) const {
    return begin_ns_ + uint64_t(ramp_s_ * 1e9 * double(serial) / double(connections_.size()));
  }

  void begin_due(uint64_t now) {
    if (rate_ > 0) {
      for (; due_ns(begun_) <= now; ++begun_) waiting_.push_back(now);
      serve_waiting();
      return;
    }
    for (; opened_ < connections_.size() && open_ns(opened_) <= now; ++opened_)
      ask(connections_[opened_], now);
  }

  void serve_waiting() {
    while (!waiting_.empty()) {
      const std::size_t at = port_of_next();
      const std::size_t unopened = opened_at_[at] * ports_.size() + at;
      Connection* free = nullptr;
      if (!idle_[at].empty()) {
        free = idle_[at].back();
        idle_[at].pop_back();
      } else if (unopened < connections_.size()) {
        free = &connections_[unopened];
        ++opened_at_[at];
      } else {
        return;
      }
      ask(*free, waiting_.front());
      waiting_.pop_front();
    }
  }

  // Which of the ports, with a shift from one round of the prompts to the next.
  std::size_t port_of_next() const {
    const auto asked = std::size_t(asked_);
    return (asked + asked / requests_.size()) % ports_.size();
  }
  std::size_t port_of(const Connection& peer) const {
    return std::size_t(&peer - connections_.data()) % ports_.size();
  }

  void open(Connection& peer) {
    peer.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    const int port = ports_[port_of(peer)];
    address.sin_port = htons(std::uint16_t(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(peer.fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
      wire::fail("connect to port " + std::to_string(port));
    fcntl(peer.fd, F_SETFL, O_NONBLOCK);
    wire::no_delay(peer.fd);
    if (std::size_t(peer.fd) >= by_fd_.size()) by_fd_.resize(std::size_t(peer.fd) * 2 + 64);
    by_fd_[peer.fd] = &peer;
    peer.in.clear();
    peer.out.clear();
    wire::watch(poller_, peer.fd, EPOLLIN, true);
  }

  void shut(Connection& peer) {
    by_fd_[peer.fd] = nullptr;
    close(peer.fd);
    peer.fd = -1;
  }

  void ask(Connection& peer, uint64_t began_ns) {
    if (count_ > 0 && asked_ >= count_) return;
    if (peer.fd < 0) open(peer);
    Request& request = requests_[std::size_t(asked_) % requests_.size()];
    if (unique_) bodies::mark(request, kind_.ids, uint64_t(asked_));
    ++asked_;
    peer.busy = true;
    peer.began_ns = began_ns;
    peer.answer.begin(kind_.stream);
    std::string_view bytes = request.bytes;
    const ssize_t went = send(peer.fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (went > 0) bytes.remove_prefix(std::size_t(went));
    if (bytes.empty()) return;
    peer.out = bytes;  // a reset shows when reading
    wire::watch(poller_, peer.fd, EPOLLIN | EPOLLOUT);
  }

  void happened(int fd, std::uint32_t what) {
    Connection* const peer = by_fd_[fd];
    if (peer == nullptr) return;
    if (what & EPOLLOUT) {
      const ssize_t went = send(fd, peer->out.data(), peer->out.size(), MSG_NOSIGNAL);
      if (went > 0) peer->out.erase(0, std::size_t(went));
      if (peer->out.empty()) wire::watch(poller_, fd, EPOLLIN);
    }
    if (!(what & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    const int got = peer->in.read(fd);
    if (got < 0) return;
    const uint64_t now = wire::now_ns();
    auto state = Answer::State::kBad;
    if (got > 0 && peer->busy) {
      state = peer->answer.feed(peer->in, [&](uint64_t stamp) { event(*peer, stamp, now); });
      if (state != Answer::State::kBad && state != Answer::State::kDone) return;
    }
    if (!peer->busy) {  // an idle connection that the router closed
      shut(*peer);
      return;
    }
    ended(*peer, state == Answer::State::kDone, now);
  }

  void event(Connection& peer, uint64_t stamp, uint64_t now) {
    if (!measuring_) return;
    ++events_;
    event_us_.push_back(float(double(now - stamp) / 1e3));
    if (peer.answer.events == 1) ttft_us_.push_back(float(double(now - peer.began_ns) / 1e3));
  }

  void ended(Connection& peer, bool done, uint64_t now) {
    peer.busy = false;
    ++answered_;
    const bool whole = done && peer.answer.whole(kind_.events);
    if (measuring_) {
      ++statuses_[peer.answer.status];
      ++(whole ? good_ : failed_);
      if (whole) latency_us_.push_back(float(double(now - peer.began_ns) / 1e3));
    }
    if (!done || peer.answer.closes) shut(peer);
    over_ = over_ || (count_ > 0 && answered_ >= count_);
    if (over_) return;
    if (rate_ > 0) {
      idle_[port_of(peer)].push_back(&peer);
      serve_waiting();
    } else {
      ask(peer, now);
    }
  }

  void report(double seconds) {
    std::string statuses = "{";
    for (const auto& [status, times] : statuses_)
      statuses += (statuses.size() > 1 ? ",\"" : "\"") + std::to_string(status) +
                  "\":" + std::to_string(times);
    std::printf(
        "{\"seconds\":%.4f,\"requests\":%ld,\"failed\":%ld,\"events\":%ld,\"waiting\":%zu,"
        "\"statuses\":%s},\"latency_us\":%s,\"event_us\":%s,\"ttft_us\":%s}\n",
        seconds, good_, failed_, events_, waiting_.size(), statuses.c_str(),
        percentiles(latency_us_, dump_).c_str(), percentiles(event_us_, false).c_str(),
        percentiles(ttft_us_, dump_).c_str());
  }

  std::vector<int> ports_;
  double rate_, ramp_s_, warmup_s_, seconds_;
  long count_;
  bool unique_, dump_;
  BodyKind kind_;
  std::vector<Request> requests_;
  int poller_;
  std::vector<Connection> connections_;
  std::vector<Connection*> by_fd_{4'096};
  std::vector<std::vector<Connection*>> idle_;  // by port
  std::vector<std::size_t> opened_at_;          // by port, where there is a rate
  std::deque<uint64_t> waiting_;                // since when
  std::size_t opened_ = 0;
  uint64_t begin_ns_ = 0, start_ns_ = 0, stop_ns_ = 0, measured_from_ns_ = 0;
  long begun_ = 0, asked_ = 0, answered_ = 0, good_ = 0, failed_ = 0, events_ = 0;
  bool measuring_ = false, over_ = false;
  std::map<int, long> statuses_;
  std::vector<float> latency_us_, event_us_, ttft_us_;
};

}  // namespace

int main(int argc, char** argv) {
  Load load(wire::flags(argc, argv,
                        {{"port", "0"},     {"conns", "64"},   {"rate", "0"},
                         {"ramp-s", "0"},   {"warmup-s", "1"}, {"seconds", "3"},
                         {"count", "0"},    {"bytes", "2048"}, {"ids", "0"},
                         {"chat", "0"},     {"stream", "0"},   {"events", "16"},
                         {"distinct", "64"}, {"shared", "0.25"}, {"unique", "0"},
                         {"session", "0"},
                         {"model", "bench"}, {"dump", "0"},    {"words", ""}}));
  load.run();
}
