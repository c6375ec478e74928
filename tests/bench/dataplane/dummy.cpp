// Engines that cost next to nothing: one thread, one port each, answers without a model.
//
//   dummy [--ports 4] [--events 16] [--delay-us 0] [--model bench] [--block-size 16]
//        [--usage 1]
//
// POST /v1/completions and /v1/chat/completions are answered at once, or, where the body says
// `"stream":true`, as chunked events of 200 bytes, `delay-us` apart from the moment the request
// came; as many as its `max_tokens`, else `events`. Each event says when it was sent, see
// wire::kStampMark, and where the body asks for ids it has them as vLLM does. Prints
// `ready PORT PORT ...`; runs until killed. GET /bench tells what came.
#include <queue>

#include "engine_pages.h"
#include "wire.h"

namespace {

using std::string;
using std::string_view;
using std::uint64_t;

struct Connection {
  Engine* engine = nullptr;
  wire::Inbox in;
  string out;  // what the socket did not take yet
  uint64_t next_ns = 0, life = 0;
  long left = 0, sent = 0;
  bool streaming = false, open = false, ids = false;
};

struct Timer {
  uint64_t at_ns;
  int fd;
  uint64_t life;  // of the connection; another one may have its number by now
  bool operator>(const Timer& other) const { return at_ns > other.at_ns; }
};

constexpr string_view kStreamHead =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";
constexpr string_view kDone = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
constexpr std::size_t kEventBytes = 200;

class Engines {
 public:
  explicit Engines(std::map<string, string> flags)
      : delay_ns_(wire::number(flags["delay-us"]) * 1'000u),
        events_(long(wire::number(flags["events"]))),
        model_(flags["model"]),
        block_size_(flags["block-size"]),
        usage_(flags["usage"] != "0"),
        poller_(wire::begin()),
        engines_(std::size_t(wire::number(flags["ports"]))) {
    string event = "data: {\"id\":\"cmpl-0\",\"object\":\"text_completion\",\"model\":\"" + model_ +
                   "\",\"system_fingerprint\":\"" + wire::kStampMark;
    stamp_at_ = event.size() + 4;
    event += string(wire::kStampDigits, '0') + "\",\"choices\":[{\"index\":0,\"text\":\"";
    const string tail = "\",\"logprobs\":null,\"finish_reason\":null", end = "}]}\n\n";
    if (event.size() + tail.size() + end.size() < kEventBytes)
      event += string(kEventBytes - event.size() - tail.size() - end.size(), 't');
    event += tail;
    event_ = chunk_of(event + end);
    const string ids = ",\"token_ids\":[12345]" + end;
    first_ids_event_ = chunk_of(event + ",\"prompt_token_ids\":[1,2,3]" + ids);
    ids_event_ = chunk_of(event + ",\"prompt_token_ids\":null" + ids);
    for (Engine& engine : engines_) listen(engine);
  }

  void run() {
    std::printf("ready");
    for (const Engine& engine : engines_) std::printf(" %d", engine.port);
    std::printf("\n");
    std::fflush(stdout);
    std::vector<epoll_event> events(512);
    for (;;) {
      const uint64_t due = timers_.empty() ? wire::now_ns() + 1'000'000'000u : timers_.top().at_ns;
      const int count = wire::wait(poller_, events, due);
      for (int i = 0; i < count; ++i) happened(events[i].data.fd, events[i].events);
      for (uint64_t now = wire::now_ns(); !timers_.empty() && timers_.top().at_ns <= now;) {
        const Timer timer = timers_.top();
        timers_.pop();
        Connection& peer = peers_[timer.fd];
        if (peer.open && peer.life == timer.life) advance(timer.fd, peer);
      }
    }
  }

 private:
  void listen(Engine& engine) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) || ::listen(fd, 4'096))
      wire::fail("listen");
    socklen_t size = sizeof address;
    getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
    engine.port = ntohs(address.sin_port);
    listeners_[fd] = &engine;
    wire::watch(poller_, fd, EPOLLIN, true);
  }

  void happened(int fd, std::uint32_t what) {
    if (const auto found = listeners_.find(fd); found != listeners_.end()) {
      accept_all(fd, *found->second);
      return;
    }
    Connection& peer = peers_[fd];
    if (!peer.open) return;
    if (what & EPOLLOUT) flush(fd, peer);
    if (peer.open && (what & (EPOLLIN | EPOLLHUP | EPOLLERR))) {
      const int got = peer.in.read(fd);
      if (got == 0) close(fd, peer);
      if (got == 1 && !peer.streaming) requests(fd, peer);
    }
  }

  void accept_all(int listener, Engine& engine) {
    for (int fd; (fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
      if (std::size_t(fd) >= peers_.size()) peers_.resize(std::size_t(fd) * 2 + 64);
      Connection& peer = peers_[fd];
      peer.engine = &engine;
      peer.in.clear();
      peer.out.clear();
      peer.streaming = false;
      peer.open = true;
      ++peer.life;
      wire::no_delay(fd);
      wire::watch(poller_, fd, EPOLLIN, true);
    }
  }

  void close(int fd, Connection& peer) {
    if (peer.streaming) {
      --peer.engine->running;
      ++peer.engine->given_up;
    }
    peer.open = peer.streaming = false;
    ++peer.life;
    ::close(fd);
  }

  // Answers every whole request that has come.
  void requests(int fd, Connection& peer) {
    while (peer.open && !peer.streaming) {
      const string_view came = peer.in.view();
      const std::size_t end = came.find("\r\n\r\n");
      if (end == string_view::npos) return;
      const string_view head = came.substr(0, end);
      if (!wire::header(head, "transfer-encoding").empty()) {
        close(fd, peer);  // routers send lengths
        return;
      }
      const string_view length = wire::header(head, "content-length");
      const std::size_t size = end + 4 + (length.empty() ? 0 : wire::number(length));
      if (came.size() < size) return;
      if (head.starts_with("POST ")) {
        post(fd, peer, came.substr(end + 4, size - end - 4));
      } else if (head.starts_with("GET ")) {
        get(fd, peer, head);
      } else {
        close(fd, peer);  // somebody tries whether this is gRPC
      }
      if (!peer.open) return;
      peer.in.take(size);
      if (peer.streaming && delay_ns_ == 0) advance(fd, peer);
    }
  }

  void post(int fd, Connection& peer, string_view body) {
    Engine& engine = *peer.engine;
    ++engine.requests;
    engine.most = std::max(engine.most, ++engine.running);
    if (!asks_for_stream(body)) {
      --engine.running;
      static const string text =
          "{\"id\":\"cmpl-0\",\"object\":\"text_completion\",\"created\":1,\"model\":\"" + model_ +
          "\",\"choices\":[{\"index\":0,\"text\":\" an answer\",\"message\":{\"role\":"
          "\"assistant\",\"content\":\" an answer\"},\"logprobs\":null,\"finish_reason\":"
          "\"length\"}],";
      static const string usage =
          !usage_ ? "\"usage\":null}" :
          "\"usage\":{\"prompt_tokens\":512,\"total_tokens\":528,\"completion_tokens\":16}}";
      static const string answer = json(text + usage), kept = json(text + params() + usage);
      const bool keeps = body.substr(0, 256).find("\"do_remote_decode\":true") != string_view::npos;
      send(fd, peer, keeps ? kept : answer);
      return;
    }
    peer.streaming = true;
    peer.left = events_;
    peer.sent = 0;
    peer.ids = body.substr(0, 256).find("\"return_token_ids\":true") != string_view::npos;
    if (const std::size_t at = body.rfind("\"max_tokens\":"); at != string_view::npos)
      peer.left = long(wire::number(body.substr(at + 13)));
    peer.next_ns = wire::now_ns() + delay_ns_;
    send(fd, peer, kStreamHead);
    if (delay_ns_ != 0) timers_.push({peer.next_ns, fd, peer.life});
  }

  // What vLLM names of the KV of a prompt of 512 tokens, for another worker to fetch.
  static string params() {
    string blocks;
    for (int block = 100; block < 132; ++block)
      blocks += (blocks.empty() ? "" : ",") + std::to_string(block);
    return "\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
           "\"remote_block_ids\":[[" + blocks + "]],\"remote_engine_id\":\"3e0bd1e4\","
           "\"remote_request_id\":\"cmpl-0\",\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,"
           "\"tp_size\":1},";
  }

  // With a size of two digits, so that the stamp's place is known.
  static string chunk_of(const string& event) {
    char size[16];
    std::snprintf(size, sizeof size, "%02zx\r\n", event.size());
    return size + event + "\r\n";
  }

  // The flag stands at the end of bodies as the load writes them; routers may write them anew.
  static bool asks_for_stream(string_view body) {
    const std::size_t tail = body.size() > 256 ? body.size() - 256 : 0;
    std::size_t at = body.find("\"stream\":", tail);
    if (at == string_view::npos) at = body.find("\"stream\":");
    if (at == string_view::npos) return false;
    at += 9;
    while (at < body.size() && body[at] == ' ') ++at;
    return body.substr(at, 4) == "true";
  }

  // Sends what is due: one event, or without a delay as many as the socket takes.
  void advance(int fd, Connection& peer) {
    while (peer.open && peer.streaming && peer.out.empty()) {
      if (peer.left == 0) {
        peer.streaming = false;
        --peer.engine->running;
        send(fd, peer, kDone);
        if (peer.open) requests(fd, peer);
        return;
      }
      const string& with_ids = peer.sent++ == 0 ? first_ids_event_ : ids_event_;
      const string& event = peer.ids ? with_ids : event_;
      char bytes[512];
      std::memcpy(bytes, event.data(), event.size());
      uint64_t now = wire::now_ns();
      for (std::size_t digit = wire::kStampDigits; digit-- > 0; now /= 10)
        bytes[stamp_at_ + digit] = char('0' + now % 10);
      --peer.left;
      send(fd, peer, {bytes, event.size()});
      if (delay_ns_ != 0 && peer.open && peer.left == 0) continue;  // the end comes with the last
      if (delay_ns_ != 0) break;
    }
    if (!peer.open || !peer.streaming || delay_ns_ == 0) return;
    peer.next_ns += delay_ns_;
    timers_.push({peer.next_ns, fd, peer.life});
  }

  void get(int fd, Connection& peer, string_view head) {
    const string_view path = head.substr(4, head.find(' ', 4) - 4);
    send(fd, peer, page(path, *peer.engine, engines_, model_, block_size_));
  }

  void send(int fd, Connection& peer, string_view bytes) {
    if (peer.out.empty()) {
      const ssize_t went = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (went < 0 && errno != EAGAIN) return close(fd, peer);
      bytes.remove_prefix(went < 0 ? 0 : std::size_t(went));
      if (bytes.empty()) return;
      wire::watch(poller_, fd, EPOLLIN | EPOLLOUT);
    }
    peer.out += bytes;
  }

  void flush(int fd, Connection& peer) {
    const ssize_t went = ::send(fd, peer.out.data(), peer.out.size(), MSG_NOSIGNAL);
    if (went < 0) {
      if (errno != EAGAIN) close(fd, peer);
      return;
    }
    peer.out.erase(0, std::size_t(went));
    if (!peer.out.empty()) return;
    wire::watch(poller_, fd, EPOLLIN);
    if (delay_ns_ == 0) advance(fd, peer);
  }

  uint64_t delay_ns_;
  long events_;
  string model_, block_size_;
  bool usage_;  // whether answers count tokens: 512, whatever the prompt has
  int poller_;
  std::vector<Engine> engines_;
  std::map<int, Engine*> listeners_;
  std::vector<Connection> peers_{1'024};
  std::priority_queue<Timer, std::vector<Timer>, std::greater<>> timers_;
  string event_, ids_event_, first_ids_event_;
  std::size_t stamp_at_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Engines engines(wire::flags(argc, argv,
                              {{"ports", "4"},
                               {"events", "16"},
                               {"delay-us", "0"},
                               {"model", "bench"},
                               {"block-size", "16"},
                               {"usage", "1"}}));
  engines.run();
}
