// What the dummy engine and the load have in common: the clock, bytes that arrive, HTTP heads.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace wire {

constexpr char kStampMark = '@';       // stands before the stamp of an event, and nowhere else
constexpr std::size_t kStampDigits = 20;  // nanoseconds of CLOCK_MONOTONIC, padded with zeros

inline std::uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::uint64_t(now.tv_sec) * 1'000'000'000u + std::uint64_t(now.tv_nsec);
}

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "error: %s%s%s\n", what.c_str(), errno ? ": " : "",
               errno ? std::strerror(errno) : "");
  std::exit(2);
}

// Bytes that came and were not used yet: read behind, taken from the front.
class Inbox {
 public:
  // Reads once. 1: something came; 0: the peer ended; -1: nothing to read now, or an error.
  int read(int fd) {
    if (size_ + 4'096 > bytes_.size())
      bytes_.resize(std::max<std::size_t>(bytes_.size() * 2, 8'192));
    const ssize_t got = ::read(fd, bytes_.data() + size_, bytes_.size() - size_);
    if (got <= 0) return got == 0 ? 0 : (errno == EAGAIN || errno == EINTR ? -1 : 0);
    size_ += std::size_t(got);
    return 1;
  }
  std::string_view view() const { return {bytes_.data() + taken_, size_ - taken_}; }
  void take(std::size_t count) {
    taken_ += count;
    if (taken_ == size_) {
      taken_ = size_ = 0;
    } else if (taken_ > bytes_.size() / 2) {
      std::memmove(bytes_.data(), bytes_.data() + taken_, size_ - taken_);
      size_ -= taken_;
      taken_ = 0;
    }
  }
  void clear() { taken_ = size_ = 0; }

 private:
  std::vector<char> bytes_;
  std::size_t size_ = 0, taken_ = 0;
};

// A header's value in a head, its name in small letters; empty where it is not there.
inline std::string_view header(std::string_view head, std::string_view name) {
  for (std::size_t at = head.find("\r\n"); at != head.npos; at = head.find("\r\n", at)) {
    at += 2;
    if (head.size() < at + name.size() + 1 || head[at + name.size()] != ':') continue;
    if (strncasecmp(head.data() + at, name.data(), name.size()) != 0) continue;
    std::size_t from = at + name.size() + 1;
    while (from < head.size() && head[from] == ' ') ++from;
    return head.substr(from, head.find("\r\n", from) - from);
  }
  return {};
}

inline std::uint64_t number(std::string_view digits, int base = 10) {
  return std::strtoull(std::string(digits.substr(0, 24)).c_str(), nullptr, base);
}

inline void watch(int poller, int fd, std::uint32_t what, bool added = false) {
  epoll_event event{};
  event.events = what;
  event.data.fd = fd;
  if (epoll_ctl(poller, added ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event) != 0) fail("epoll_ctl");
}

inline void no_delay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// Waits for events, no longer than until `until_ns` of the clock.
inline int wait(int poller, std::vector<epoll_event>& events, std::uint64_t until_ns) {
  const std::uint64_t now = now_ns();
  const std::uint64_t left = until_ns > now ? until_ns - now : 0;
  const timespec span{time_t(left / 1'000'000'000u), long(left % 1'000'000'000u)};
  const int count = epoll_pwait2(poller, events.data(), int(events.size()), &span, nullptr);
  return count < 0 ? 0 : count;
}

// Many sockets, and timers that keep their time.
inline int begin() {
  std::signal(SIGPIPE, SIG_IGN);
  prctl(PR_SET_TIMERSLACK, 1);
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  const int poller = epoll_create1(EPOLL_CLOEXEC);
  if (poller < 0) fail("epoll_create1");
  return poller;
}

// `--name value ...`, every name one of `defaults`.
inline std::map<std::string, std::string> flags(int argc, char** argv,
                                                std::map<std::string, std::string> defaults) {
  errno = 0;
  for (int at = 1; at < argc; at += 2) {
    const std::string name = argv[at] + 2 * (std::strncmp(argv[at], "--", 2) == 0);
    if (!defaults.contains(name)) fail("no flag --" + name);
    if (at + 1 == argc) fail("--" + name + " lacks its value");
    defaults[name] = argv[at + 1];
  }
  return defaults;
}

}  // namespace wire
