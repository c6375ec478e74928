// Connections to workers: taken from the idle ones, made, kept and closed.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "relay/relay.h"

namespace kv::relay {

namespace {

// The worker is not to blame where the process, or the system, may open no more files.
Failure failure_of(int error) {
  const bool ours = error == EMFILE || error == ENFILE;
  return {ours ? Fault::out_of_files : Fault::connect,
          std::string("no connection: ") + std::strerror(error)};
}

}  // namespace

Address address_of(const std::string& host, std::uint16_t port) {
  Address address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (::inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    address.size = sizeof *v4;
  } else if (::inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    address.size = sizeof *v6;
  } else {
    throw std::invalid_argument("addresses must be numeric, as 127.0.0.1 or ::1, got " + host);
  }
  return address;
}

void Relay::begin(Job& job) {
  job.started_s = now_s_;
  if (job.order.pool->closed) {
    end(job, {Fault::connect, "the worker was removed"});
    return;
  }
  Connection* connection = take_idle(*job.order.pool);
  if (connection != nullptr) {
    exchange(job, *connection);
  } else {
    connect(job);
  }
}

// The idle connection used last, which is the one least likely to be closed by now.
Connection* Relay::take_idle(Pool& pool) {
  const double oldest_s = now_s_ - pool.limits.idle_s;
  while (!pool.idle.empty() && pool.idle.front()->idle_since_s < oldest_s) drop(*pool.idle.front());
  while (!pool.idle.empty()) {
    Connection* connection = pool.idle.back();
    char byte = 0;
    const ssize_t size = ::recv(connection->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (size < 0 && errno == EAGAIN) {
      pool.idle.pop_back();
      --pool.idle_count;
      return connection;
    }
    drop(*connection);  // its end, or bytes that would be taken for the answer to what follows
  }
  return nullptr;
}

// Makes a fresh connection for a job, or ends it.
void Relay::connect(Job& job) {
  Pool& pool = *job.order.pool;
  if (pool.open >= pool.limits.max_connections) {
    if (pool.idle.empty()) {
      end(job, {Fault::busy, "all " + std::to_string(pool.limits.max_connections) +
                                 " connections to the worker are in use"});
      return;
    }
    drop(*pool.idle.front());
  }
  job.address = 0;
  timers_.start(&job, job.deadline, now_s_ + job.order.timeouts.connect_s);
  while (!try_address(job)) {
    if (++job.address < pool.addresses.size()) continue;
    if (pool.addresses.empty()) {
      end(job, {Fault::connect, "no connection: no address"});
    } else {
      end(job, failure_of(errno));
    }
    return;
  }
}

// Begins to connect to the job's present address; false, with errno, if that cannot be begun.
bool Relay::try_address(Job& job) {
  Pool& pool = *job.order.pool;
  if (job.address >= pool.addresses.size()) return false;
  const Address& address = pool.addresses[job.address];
  const int fd = open_socket(address.storage.ss_family);
  if (fd < 0) return false;
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // A worker's machine that vanishes during a long silent prefill is noticed this way.
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  const auto* to = reinterpret_cast<const sockaddr*>(&address.storage);
  if (::connect(fd, to, address.size) < 0 && errno != EINPROGRESS) {
    const int error = errno;
    ::close(fd);
    errno = error;
    return false;
  }
  auto made = std::make_unique<Connection>();
  Connection& connection = *made;
  connection.fd = fd;
  connection.pool = &pool;
  connection.job = &job;
  job.connection = &connection;
  connections_.emplace(&connection, std::move(made));
  pool.all.push_back(&connection);
  ++pool.open;
  watch(connection, EPOLLOUT);
  return true;
}

// A socket, or -1 with errno. Its number is the lowest that is free: it tells how many files are
// open. Where they run short, connections that lie idle make room, whichever worker they lead to.
int Relay::open_socket(int family) {
  for (;;) {
    const int fd = ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && fd < idle_files_) return fd;
    const int error = fd < 0 ? errno : EMFILE;
    const bool short_of = error == EMFILE || error == ENFILE;
    const bool again = short_of && drop_longest_idle();
    if (!again && fd >= 0 && fd < most_files_) return fd;
    if (fd >= 0) ::close(fd);
    if (again) continue;
    errno = error;
    return -1;
  }
}

// False where none is idle.
bool Relay::drop_longest_idle() {
  Connection* longest = nullptr;
  for (const auto& pool : pools_) {
    if (pool->idle.empty()) continue;
    Connection* first = pool->idle.front();
    if (longest == nullptr || first->idle_since_s < longest->idle_since_s) longest = first;
  }
  if (longest != nullptr) drop(*longest);
  return longest != nullptr;
}

void Relay::on_connecting(Connection& connection) {
  Job& job = *connection.job;
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(connection.fd, SOL_SOCKET, SO_ERROR, &error, &size);
  if (error == 0) {
    connection.connecting = false;
    exchange(job, connection);
    return;
  }
  drop(connection);
  job.connection = nullptr;
  while (++job.address < job.order.pool->addresses.size()) {
    if (try_address(job)) return;
    error = errno;
  }
  end(job, failure_of(error));
}

void Relay::keep(Connection& connection) {
  Pool& pool = *connection.pool;
  connection.job = nullptr;
  connection.used = true;
  connection.idle_since_s = now_s_;
  pool.idle.push_back(&connection);
  ++pool.idle_count;
  watch(connection, EPOLLIN);
}

void Relay::drop(Connection& connection) {
  Pool& pool = *connection.pool;
  if (connection.job == nullptr) pool.idle_count -= std::erase(pool.idle, &connection);
  std::erase(pool.all, &connection);
  --pool.open;
  watch(connection, 0);
  ::close(connection.fd);
  connection.fd = -1;
  const auto held = connections_.find(&connection);
  past_connections_.push_back(std::move(held->second));
  connections_.erase(held);
}

// A connection nobody waits for must not be told of at all: a hang-up is told again and again.
void Relay::watch(Connection& connection, std::uint32_t events) {
  if (connection.watched == events) return;
  epoll_event event{};
  event.events = events;
  event.data.ptr = static_cast<Source*>(&connection);
  const int how = events == 0              ? EPOLL_CTL_DEL
                  : connection.watched == 0 ? EPOLL_CTL_ADD
                                            : EPOLL_CTL_MOD;
  ::epoll_ctl(epoll_, how, connection.fd, &event);
  connection.watched = events;
}

}  // namespace kv::relay
