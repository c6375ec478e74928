#include "relay/marks.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace kv::relay {

Marks::Marks() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Marks::~Marks() { ::close(fd_); }

void Marks::push(Mark mark) {
  const std::scoped_lock lock(mutex_);
  marks_.push_back(std::move(mark));
}

void Marks::progress(std::uint64_t job, double at_s, std::uint64_t events, Place& place) {
  const std::scoped_lock lock(mutex_);
  if (place.batch != batch_) {
    place = {batch_, marks_.size()};
    marks_.push_back({job, at_s, 0, events, nullptr});
  } else {
    marks_[place.index].at_s = at_s;
    marks_[place.index].events = events;
  }
}

void Marks::announce() {
  {
    const std::scoped_lock lock(mutex_);
    if (announced_ || marks_.empty()) return;
    announced_ = true;
  }
  const std::uint64_t one = 1;
  // It can only fail where the counter is full, and then it is readable anyway.
  [[maybe_unused]] const auto written = ::write(fd_, &one, sizeof one);
}

std::vector<Mark> Marks::take() {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto taken = ::read(fd_, &count, sizeof count);
  const std::scoped_lock lock(mutex_);
  announced_ = false;
  ++batch_;
  return std::exchange(marks_, {});
}

}  // namespace kv::relay
