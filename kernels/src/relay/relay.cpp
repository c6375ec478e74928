#include "relay/relay.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace kv::relay {

namespace {

constexpr int kEventsAtOnce = 256;
constexpr double kPauseS = 0.25;  // that this thread slept too long: it stood still
constexpr std::size_t kReadBytes = 65'536;

std::system_error system_error(const char* what) {
  return {errno, std::generic_category(), what};
}

}  // namespace

double monotonic_s() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

const char* name_of(Fault fault) {
  switch (fault) {
    case Fault::none: return "";
    case Fault::busy: return "busy";
    case Fault::out_of_files: return "out_of_files";
    case Fault::connect: return "connect";
    case Fault::timeout_connect: return "timeout_connect";
    case Fault::early_close: return "early_close";
    case Fault::timeout_send: return "timeout_send";
    case Fault::timeout_first_byte: return "timeout_first_byte";
    case Fault::timeout_between: return "timeout_between";
    case Fault::garbage: return "garbage";
    case Fault::status_5xx: return "status_5xx";
    case Fault::no_answer: return "no_answer";
    case Fault::slow_client: return "slow_client";
    case Fault::client_closed: return "client_closed";
    case Fault::cancelled: return "cancelled";
  }
  return "";
}

Relay::Relay() : buffer_(new char[kReadBytes]) {
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
    const int all = static_cast<int>(std::min<rlim_t>(files.rlim_cur, INT_MAX));
    idle_files_ = all - std::min(256, all / 2);
    most_files_ = all - std::min(64, all / 8);
  }
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) throw system_error("epoll_create1");
  wake_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = &wake_source_;
  if (wake_ < 0 || ::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) < 0) {
    const std::system_error error = system_error("eventfd");
    ::close(epoll_);
    if (wake_ >= 0) ::close(wake_);
    throw error;
  }
  // Signals are the main thread's: Python's handlers run there.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

std::shared_ptr<Job> Relay::submit(Order order) {
  auto job = std::make_shared<Job>(std::move(order));
  if (stopped_) throw std::runtime_error("the relay was stopped");
  tell({Command::Kind::submit, job, nullptr, {}, 0});
  return job;
}

Relay::Had Relay::cancel(const std::shared_ptr<Job>& job) {
  Had had;
  {
    const std::scoped_lock lock(job->gate);
    had = {job->written, job->ends_with_connection, job->whole};
    watch_client(*job, false);
    if (had.whole) return had;
    job->cancelled = true;
  }
  tell({Command::Kind::cancel, job, nullptr, {}, 0});
  return had;
}

void Relay::set_addresses(const std::shared_ptr<Pool>& pool, std::vector<Address> addresses) {
  tell({Command::Kind::addresses, nullptr, pool, std::move(addresses), 0});
}

void Relay::abandon_silent(const std::shared_ptr<Pool>& pool) {
  tell({Command::Kind::abandon, nullptr, pool, {}, 0});
}

void Relay::close(const std::shared_ptr<Pool>& pool, std::uint64_t id) {
  tell({Command::Kind::close, nullptr, pool, {}, id});
}

void Relay::stop() {
  if (!thread_.joinable()) return;
  tell({Command::Kind::stop, nullptr, nullptr, {}, 0});
  thread_.join();
  stopped_ = true;
  commands_.clear();
  ::close(wake_);
  ::close(epoll_);
}

void Relay::tell(Command command) {
  if (stopped_) return;
  bool first = false;
  {
    const std::scoped_lock lock(mutex_);
    first = commands_.empty();
    commands_.push_back(std::move(command));
  }
  const std::uint64_t one = 1;
  if (first) [[maybe_unused]] const auto written = ::write(wake_, &one, sizeof one);
}

void Relay::run() {
  ::pthread_setname_np(::pthread_self(), "warmroute-relay");  // as `top -H` shows it
  // Where Python is on the same core, to be woken is not to cut in: it wakes us for every request,
  // and two switches of each cost a third of its CPU. A turn that lasts still ends for us. Where
  // it is not allowed all goes on as it was.
  const sched_param usual{};
  [[maybe_unused]] const int refused =
      ::pthread_setschedparam(::pthread_self(), SCHED_BATCH, &usual);
  std::vector<epoll_event> events(kEventsAtOnce);
  while (!stopping_) {
    const int waits_ms = wait_ms();
    const double began_s = monotonic_s();
    const int count = ::epoll_wait(epoll_, events.data(), kEventsAtOnce, waits_ms);
    now_s_ = monotonic_s();
    // Of the process, or its machine: what was due meanwhile had nobody to come to.
    const double pause_s = waits_ms < 0 ? 0.0 : now_s_ - began_s - waits_ms * 1e-3;
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      on_event(static_cast<Source*>(event.data.ptr), event.events);
    }
    fire_timers(pause_s < kPauseS ? 0.0 : pause_s);
    if (urgent_ || (flush_at_s_ >= 0 && now_s_ >= flush_at_s_)) {
      urgent_ = false;
      flush_at_s_ = -1.0;
      marks_.announce();
    }
    past_jobs_.clear();
    past_connections_.clear();
  }
  while (!jobs_.empty()) end(*jobs_.begin()->first, {Fault::cancelled, "the relay was stopped"});
  for (const auto& pool : pools_) {
    while (!pool->all.empty()) drop(*pool->all.back());
  }
  past_jobs_.clear();
  past_connections_.clear();
  marks_.announce();
}

int Relay::wait_ms() const {
  double until_s = flush_at_s_;
  if (!timers_.empty() && (until_s < 0 || timers_.next_s() < until_s)) until_s = timers_.next_s();
  if (until_s < 0) return -1;
  const double left_ms = (until_s - monotonic_s()) * 1e3;
  return static_cast<int>(std::clamp(std::ceil(left_ms), 0.0, 1e6));
}

void Relay::on_event(Source* source, std::uint32_t events) {
  switch (source->kind) {
    case Source::Kind::wake: obey(); break;
    case Source::Kind::worker: on_worker(*static_cast<Connection*>(source), events); break;
    case Source::Kind::client: {
      Job& job = *static_cast<Job::ClientSource*>(source)->job;
      if (!job.ended) on_client(job);
      break;
    }
  }
}

void Relay::obey() {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto taken = ::read(wake_, &count, sizeof count);
  std::vector<Command> commands;
  {
    const std::scoped_lock lock(mutex_);
    commands.swap(commands_);
  }
  for (Command& command : commands) obey(command);
}

void Relay::obey(Command& command) {
  switch (command.kind) {
    case Command::Kind::submit:
      jobs_.emplace(command.job.get(), command.job);
      begin(*command.job);
      break;
    case Command::Kind::cancel:
      if (!command.job->ended) end(*command.job, {Fault::cancelled, "given up"});
      break;
    case Command::Kind::addresses:
      if (std::find(pools_.begin(), pools_.end(), command.pool) == pools_.end()) {
        pools_.push_back(command.pool);
      }
      command.pool->addresses = std::move(command.addresses);
      break;
    case Command::Kind::abandon: abandon(*command.pool); break;
    case Command::Kind::close: {
      close_all(command.pool);
      marks_.push({command.id, now_s_, 0, 0, std::make_unique<End>()});
      urgent_ = true;
      break;
    }
    case Command::Kind::stop: stopping_ = true; break;
  }
}

void Relay::abandon(Pool& pool) {
  const std::vector<Connection*> all = pool.all;
  for (Connection* connection : all) {
    if (connection->connecting) continue;
    if (connection->job == nullptr) {
      drop(*connection);
    } else if (connection->job->expendable()) {
      end(*connection->job, {Fault::early_close, "the worker does not answer its probes"});
    }
  }
}

void Relay::close_all(const std::shared_ptr<Pool>& pool) {
  pool->closed = true;
  while (!pool->all.empty()) {
    Connection& connection = *pool->all.back();
    if (connection.job == nullptr) {
      drop(connection);
    } else if (connection.connecting) {
      end(*connection.job, {Fault::connect, "the worker was removed"});
    } else {
      lost(connection, false);
    }
  }
  std::erase(pools_, pool);
}

void Relay::fire_timers(double pause_s) {
  while (!timers_.empty() && timers_.next_s() <= now_s_) {
    Job& job = *timers_.next();
    if (pause_s > 0 && job.deadline.at_s <= now_s_) timers_.push(job.deadline, now_s_ + pause_s);
    if (job.deadline.at_s > now_s_) {
      timers_.start(&job, job.deadline, job.deadline.at_s);
    } else {
      timers_.stop(job.deadline);
      late(job);
    }
  }
}

void Relay::late(Job& job) {
  char text[64];
  if (job.connection != nullptr && job.connection->connecting) {
    std::snprintf(text, sizeof text, "no connection within %g s", job.order.timeouts.connect_s);
    end(job, {Fault::timeout_connect, text});
  } else if (job.paused) {
    end(job, {Fault::slow_client, "the client stopped reading its reply"});
  } else if (job.reply->withholds() && job.show_at_s >= 0 && job.show_at_s <= now_s_) {
    job.reply->show();
    on_body(job);
    if (!job.ended && job.reply->failure()) end(job, job.reply->failure());
  } else if (!job.reply->headed() && !job.all_sent()) {
    end(job, {Fault::timeout_send, "the worker stopped taking the request"});
  } else if (!job.heard) {
    end(job, {Fault::timeout_first_byte, "the worker took too long to begin"});
  } else {
    end(job, {Fault::timeout_between, "the worker stopped in its reply"});
  }
}

}  // namespace kv::relay
