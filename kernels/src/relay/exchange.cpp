// One request and its reply on one connection; the twin is `router/upstream/fallback.py`.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "relay/relay.h"

namespace kv::relay {

namespace {

constexpr std::size_t kReadBytes = 65'536;

// Of the least time between two marks of progress: how long one waits for those of other requests.
constexpr double kFlushShare = 0.25;

std::uint32_t wanted(const Job& job) {
  std::uint32_t events = job.paused ? 0u : static_cast<std::uint32_t>(EPOLLIN);
  if (!job.all_sent() && !job.unsendable) events |= EPOLLOUT;
  return events;
}

}  // namespace

void Relay::exchange(Job& job, Connection& connection) {
  connection.job = &job;
  job.connection = &connection;
  job.started_s = now_s_;
  job.sent = 0;
  job.unsendable = false;
  job.received = 0;
  if (job.order.journal != nullptr) job.journal = std::make_shared<Journal>(job.order.journal);
  job.reply.emplace(connection.pool->limits, job.order.head_request, job.order.client,
                    job.journal.get(), job.order.kept_bytes(), job.order.due);
  job.heard = false;
  job.show_at_s = -1.0;
  timers_.start(&job, job.deadline, now_s_ + job.order.timeouts.send_s);
  send_request(job);
  watch(connection, wanted(job));
}

// Writes what the worker takes now.
void Relay::send_request(Job& job) {
  const Order& order = job.order;
  const std::size_t of_head = std::min(job.sent, order.head.size());
  const std::size_t of_body = job.sent - of_head;
  iovec parts[2] = {
      {const_cast<char*>(order.head.data()) + of_head, order.head.size() - of_head},
      {const_cast<char*>(order.body.data()) + of_body, order.body.size() - of_body}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = order.body.empty() ? 1 : 2;
  const ssize_t size = ::sendmsg(job.connection->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (size < 0) {
    // What it said before it closed is still read; its end is told there.
    job.unsendable = errno != EAGAIN && errno != EINTR;
    return;
  }
  job.sent += static_cast<std::size_t>(size);
  if (job.reply->headed()) return;
  const Timeouts& timeouts = order.timeouts;
  const double late_s = job.all_sent() ? timeouts.first_byte_s : timeouts.send_s;
  if (now_s_ + late_s >= job.deadline.at_s) {
    Timers::push(job.deadline, now_s_ + late_s);
  } else {
    timers_.start(&job, job.deadline, now_s_ + late_s);
  }
}

void Relay::on_worker(Connection& connection, std::uint32_t events) {
  if (connection.fd < 0) return;  // closed within this batch of events
  if (connection.connecting) {
    on_connecting(connection);
    return;
  }
  if ((connection.watched & EPOLLOUT) != 0 && (events & ~static_cast<std::uint32_t>(EPOLLIN))) {
    Job& job = *connection.job;
    send_request(job);
    watch(connection, wanted(job));
  }
  const bool readable = (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0;
  if (readable && (connection.watched & EPOLLIN) != 0) on_readable(connection);
}

void Relay::on_readable(Connection& connection) {
  const ssize_t size = ::recv(connection.fd, buffer_.get(), kReadBytes, MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (connection.job == nullptr) {
    // Nobody asked: what follows could be taken for the answer to the next request.
    drop(connection);
  } else if (size <= 0) {
    lost(connection, size == 0);
  } else {
    on_reply(*connection.job, {buffer_.get(), static_cast<std::size_t>(size)});
  }
}

void Relay::on_reply(Job& job, std::string_view data) {
  Reply& reply = *job.reply;
  job.received += data.size();
  const bool failed = reply.failed();
  try {
    reply.feed(data);
  } catch (const Broken& broken) {
    end(job, {broken.fault, broken.what()});
    return;
  }
  if (!failed && reply.failed()) {
    timers_.start(&job, job.deadline, now_s_ + job.order.pool->limits.held_s);
  } else if (reply.held() && !reply.failed()) {
    timers_.start(&job, job.deadline, now_s_ + job.order.timeouts.between_s);
    job.last_byte_s = now_s_;
    if (!job.heard) job.first_byte_s = now_s_;
    job.heard = true;
  } else if (reply.withholds() && reply.body_bytes() == 0) {
    wait_for_answer(job);
  }
  if (reply.body_bytes() != 0) on_body(job);
  if (!job.ended && (reply.done() || reply.failure())) end(job, reply.failure());
}

// A part of the body came that its client does not get yet. One that keeps connections open is
// passed on after a while all the same: that is what it is for.
void Relay::wait_for_answer(Job& job) {
  const double show_s = now_s_ + job.order.pool->limits.held_s;
  if (job.show_at_s < 0 && job.reply->pings()) job.show_at_s = show_s;
  const double late_s = now_s_ + job.order.timeouts.between_s;
  timers_.start(&job, job.deadline, job.show_at_s < 0 ? late_s : std::min(late_s, job.show_at_s));
  job.last_byte_s = now_s_;
  job.heard = true;
}

void Relay::on_body(Job& job) {
  const Reply& reply = *job.reply;
  const bool first = job.silent();
  const bool begins = job.first_byte_s < 0 && reply.begun();
  job.last_byte_s = now_s_;
  job.heard = true;
  if (begins) job.first_byte_s = now_s_;
  if (first && !reply.done()) {
    timers_.start(&job, job.deadline, now_s_ + job.order.timeouts.between_s);
  } else if (!first) {
    Timers::push(job.deadline, now_s_ + job.order.timeouts.between_s);
  }
  job.bytes_to_client += reply.body_bytes();
  forward(job);
  if (job.ended) return;
  if (job.order.tells && begins) {
    if (reply.meter().events() != 0) {
      job.told_s = now_s_;
      job.told_events = reply.meter().events();
    }
    marks_.push({job.order.id, now_s_, reply.status(), job.told_events, nullptr});
    urgent_ = true;
  } else if (job.order.tells && reply.begun()) {
    tell_progress(job);
  }
  if (!reply.done()) pause_where_behind(job);
}

// Gives the client what there is for it, after the head where that has not gone out.
void Relay::forward(Job& job) {
  Reply& reply = *job.reply;
  if (reply.forward().empty()) return;
  const bool begun = job.written != 0;
  give(job, begun ? std::string_view() : std::string_view(reply.head_for_client()),
       reply.forward());
}

void Relay::tell_progress(Job& job) {
  const std::uint64_t events = job.reply->meter().events();
  const double least_s = job.order.pool->limits.progress_s;
  if (events == job.told_events || (job.told_s >= 0 && now_s_ - job.told_s < least_s)) return;
  job.told_s = now_s_;
  job.told_events = events;
  marks_.progress(job.order.id, now_s_, events, job.told_at);
  if (flush_at_s_ < 0) flush_at_s_ = now_s_ + least_s * kFlushShare;
}

// The worker's side of a connection ended.
void Relay::lost(Connection& connection, bool orderly) {
  Job& job = *connection.job;
  const bool headed = job.reply->headed();
  if (orderly && headed && job.reply->closes()) {
    job.reply->close();
    if (job.reply->body_bytes() != 0) {
      on_body(job);
    } else {
      forward(job);
    }
    if (!job.ended) end(job, job.reply->failure());
    return;
  }
  const bool closed = connection.pool->closed;
  job.stale = connection.used && job.received == 0 && !closed;
  if (job.stale && !job.order.once) {
    job.stale = false;
    // Workers close idle connections without a word: it says nothing of this request.
    drop(connection);
    job.connection = nullptr;
    connect(job);
    return;
  }
  end(job, {Fault::early_close, std::string("the worker hung up ") +
                                    (headed ? "in the middle of" : "before") + " its reply"});
}

// Settles a request, once.
void Relay::end(Job& job, Failure failure) {
  timers_.stop(job.deadline);
  const bool whole = !failure;
  const bool given_up = failure.fault == Fault::cancelled;
  Connection* connection = job.connection;
  const bool replied = connection != nullptr && !connection->connecting && job.reply->headed();
  bool reusable = replied && whole && job.reply->reusable() && !job.reply->surplus();
  if (replied && job.reply->failed() && !given_up) {
    failure = job.reply->held_failure();
  } else if (replied && whole && job.bytes_to_client == 0 && !job.reply->held()) {
    give(job, job.reply->head_for_client(), {});
    if (job.ended) return;  // there was nobody to give it to
  }
  job.ended = true;
  reusable = reusable && job.all_sent();
  job.connection = nullptr;
  if (connection != nullptr && reusable) {
    keep(*connection);
  } else if (connection != nullptr) {
    drop(*connection);
  }
  finish(job, std::move(failure), whole);
}

// Tells of the end, once nothing of the job is left in the thread's hands.
void Relay::finish(Job& job, Failure failure, bool held_whole) {
  give_back_client(job);
  auto end = std::make_unique<End>();
  end->failure = std::move(failure);
  end->bytes_to_client = job.bytes_to_client;
  end->started_s = job.started_s;
  end->first_byte_s = job.first_byte_s;
  end->last_byte_s = job.last_byte_s;
  end->written = job.written;
  end->stale = job.stale;
  if (job.reply.has_value() && job.reply->headed()) {
    const Reply& reply = *job.reply;
    end->status = reply.status();
    end->reason = reply.reason();
    end->persistent = reply.persistent();
    end->ends_with_connection = reply.ends_with_connection();
    // What it keeps is Python's to free, not for this job's own end to wait for.
    if (reply.by_events()) end->journal = std::move(job.journal);
    if (held_whole && !end->failure) end->flaw = reply.flaw();
    end->refused = reply.refuses();
    if (!reply.failed() && !reply.withholds()) {
      end->events = reply.meter().events();
      end->usage = reply.meter().usage();
    }
    if (reply.held() && held_whole) {
      end->held = true;
      end->held_head = reply.held_head();
      end->held_body = reply.held_body();
    }
  }
  if (job.waiting() != 0) end->unsent = job.unsent.substr(job.unsent_at);
  marks_.push({job.order.id, now_s_, 0, 0, std::move(end)});
  urgent_ = true;
  const auto held = jobs_.find(&job);
  past_jobs_.push_back(std::move(held->second));
  jobs_.erase(held);
}

}  // namespace kv::relay
