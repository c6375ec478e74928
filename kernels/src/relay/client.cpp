// The client's side of the relay: written to while it takes what comes, waited for while not.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>

#include "relay/relay.h"

namespace kv::relay {

namespace {

constexpr int kFlags = MSG_NOSIGNAL | MSG_DONTWAIT;

// How many bytes the system took that says `sent` of it; `gone`: it never takes any more.
std::size_t took(ssize_t sent, bool& gone) {
  gone = sent < 0 && errno != EAGAIN && errno != EINTR;
  return sent > 0 ? static_cast<std::size_t>(sent) : 0;
}

}  // namespace

// Writes a part of the reply, or keeps what the client does not take now.
void Relay::give(Job& job, std::string_view head, std::string_view data) {
  bool gone = false;
  {
    const std::scoped_lock lock(job.gate);
    if (job.cancelled) return;  // its command is on the way
    job.written += head.size() + data.size();
    job.ends_with_connection = job.reply->ends_with_connection();
    std::size_t size = 0;
    if (job.waiting() == 0 && head.empty()) {
      size = took(::send(job.order.client_fd, data.data(), data.size(), kFlags), gone);
    } else if (job.waiting() == 0) {
      iovec parts[2] = {{const_cast<char*>(head.data()), head.size()},
                        {const_cast<char*>(data.data()), data.size()}};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = data.empty() ? 1 : 2;
      size = took(::sendmsg(job.order.client_fd, &message, kFlags), gone);
    }
    if (!gone && size < head.size()) job.unsent.append(head.substr(size));
    const std::size_t of_data = size > head.size() ? size - head.size() : 0;
    if (!gone && of_data < data.size()) job.unsent.append(data.substr(of_data));
    job.whole = !gone && job.reply->done() && !job.reply->failure();
    if (!gone && !job.whole && job.waiting() != 0) watch_client(job, true);
  }
  if (gone) end(job, {Fault::client_closed, "the client closed its connection"});
}

// The client takes more.
void Relay::on_client(Job& job) {
  bool gone = false;
  {
    const std::scoped_lock lock(job.gate);
    if (job.cancelled) return;
    const char* unsent = job.unsent.data() + job.unsent_at;
    job.unsent_at += took(::send(job.order.client_fd, unsent, job.waiting(), kFlags), gone);
    if (!gone && job.waiting() == 0) watch_client(job, false);
  }
  if (gone) {
    end(job, {Fault::client_closed, "the client closed its connection"});
    return;
  }
  if (job.waiting() == 0) {
    job.unsent = std::string();
    job.unsent_at = 0;
  } else if (job.unsent_at > job.unsent.size() / 2) {
    job.unsent.erase(0, job.unsent_at);
    job.unsent_at = 0;
  }
  if (job.paused && job.waiting() <= job.order.client_buffer_bytes / 4) {
    job.paused = false;
    timers_.start(&job, job.deadline, now_s_ + job.order.timeouts.between_s);
    watch(*job.connection, job.connection->watched | EPOLLIN);
  }
}

// The client has a limit of its own; the worker is not to blame for this wait.
void Relay::pause_where_behind(Job& job) {
  if (job.paused || job.waiting() <= job.order.client_buffer_bytes) return;
  job.paused = true;
  timers_.start(&job, job.deadline, now_s_ + job.order.timeouts.client_s);
  watch(*job.connection, job.connection->watched & ~static_cast<std::uint32_t>(EPOLLIN));
}

// With the job's gate held.
void Relay::watch_client(Job& job, bool wanted) {
  if (job.client_watched == wanted) return;
  job.client_watched = wanted;
  epoll_event event{};
  event.events = EPOLLOUT;
  event.data.ptr = static_cast<Source*>(&job.client);
  ::epoll_ctl(epoll_, wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, job.order.client_fd, &event);
}

// The socket is Python's, which may close it from now on.
void Relay::give_back_client(Job& job) {
  const std::scoped_lock lock(job.gate);
  watch_client(job, false);
}

}  // namespace kv::relay
