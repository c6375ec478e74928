// Python's side of the relay: orders in, marks out. The thread never needs the GIL; what Python
// lends it (a request's body) is kept here until the end of the request was taken.
#include "bindings.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <unordered_map>
#include <utility>

#include "relay/relay.h"

namespace nb = nanobind;
using kv::relay::End;
using kv::relay::JournalTerms;
using kv::relay::Limits;
using kv::relay::Mark;
using kv::relay::Order;
using kv::relay::Pool;
using kv::relay::Relay;
using kv::relay::Timeouts;

namespace {

nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::object moment(double at_s) { return at_s < 0 ? nb::none() : nb::object(nb::float_(at_s)); }

// The relay and what it borrows of Python. Lifetime: process.
class Borrower {
 public:
  std::uint64_t submit(std::shared_ptr<Pool> pool, nb::bytes head, nb::bytes body,
                       bool head_request, int client_fd, nb::bytes extra_lines, bool keep_alive,
                       std::size_t client_buffer_bytes, const Timeouts& timeouts, bool tells,
                       std::shared_ptr<JournalTerms> journal, const kv::answer::Due* due,
                       bool once) {
    Order order;
    order.id = ++last_id_;
    order.pool = std::move(pool);
    order.head = view_of(head);
    order.body = view_of(body);
    order.head_request = head_request;
    order.client = {std::string(view_of(extra_lines)), keep_alive};
    order.client_buffer_bytes = client_buffer_bytes;
    order.timeouts = timeouts;
    order.tells = tells;
    order.journal = std::move(journal);
    order.client_fd = client_fd;
    if (due != nullptr) order.due = *due;
    order.once = once;
    const std::uint64_t id = order.id;
    lent_.emplace(id, Lent{relay_.submit(std::move(order)), body});
    return id;
  }

  nb::tuple cancel(std::uint64_t id) {
    const auto lent = lent_.find(id);
    const Relay::Had had =
        lent == lent_.end() ? Relay::Had{} : relay_.cancel(lent->second.job);
    return nb::make_tuple(had.written, had.ends_with_connection, had.whole);
  }

  nb::list take() {
    nb::list all;
    for (Mark& mark : relay_.marks().take()) {
      nb::object end = nb::none();
      if (mark.end != nullptr) {
        lent_.erase(mark.job);
        end = nb::cast(std::shared_ptr<End>(std::move(mark.end)));
      }
      all.append(nb::make_tuple(mark.job, mark.at_s, mark.status, mark.events, end));
    }
    return all;
  }

  std::uint64_t close(const std::shared_ptr<Pool>& pool) {
    relay_.close(pool, ++last_id_);
    return last_id_;
  }

  void stop() {
    {
      const nb::gil_scoped_release unlocked;
      relay_.stop();
    }
    lent_.clear();
  }

  Relay& relay() { return relay_; }

 private:
  struct Lent {
    std::shared_ptr<kv::relay::Job> job;
    nb::bytes body;
  };

  std::uint64_t last_id_ = 0;
  std::unordered_map<std::uint64_t, Lent> lent_;
  Relay relay_;
};

std::shared_ptr<Pool> make_pool(std::size_t max_connections, double idle_s,
                                std::size_t header_bytes, std::size_t chunk_line_bytes,
                                std::size_t held_bytes, double held_s, std::size_t tail_bytes,
                                double progress_s) {
  return std::make_shared<Pool>(Limits{max_connections, idle_s, header_bytes, chunk_line_bytes,
                                       held_bytes, held_s, tail_bytes, progress_s});
}

void set_addresses(Borrower& self, const std::shared_ptr<Pool>& pool,
                   const std::vector<std::string>& hosts, std::uint16_t port) {
  std::vector<kv::relay::Address> addresses;
  for (const std::string& host : hosts) addresses.push_back(kv::relay::address_of(host, port));
  self.relay().set_addresses(pool, std::move(addresses));
}

// A reply by itself, for tests to hold against the Python twin.
struct LoneReply {
  LoneReply(std::shared_ptr<Pool> bounds, bool head_request, nb::bytes extra_lines,
            bool keep_alive, const kv::answer::Due* due)
      : pool(std::move(bounds)),
        client{std::string(view_of(extra_lines)), keep_alive},
        reply(pool->limits, head_request, client, nullptr, 0,
              due == nullptr ? kv::answer::Due{} : *due) {}

  // What goes to the client of `data`, and the name of the fault that ended it.
  nb::tuple feed(nb::bytes data) {
    const char* fault = "";
    try {
      reply.feed(view_of(data));
    } catch (const kv::relay::Broken& broken) {
      return nb::make_tuple(nb::bytes("", 0), name_of(broken.fault));
    }
    return nb::make_tuple(nb::bytes(reply.forward().data(), reply.forward().size()), fault);
  }

  // What goes to the client where the worker's connection ends.
  nb::bytes close() {
    reply.close();
    return nb::bytes(reply.forward().data(), reply.forward().size());
  }

  std::shared_ptr<Pool> pool;
  kv::relay::ClientTerms client;
  kv::relay::Reply reply;
};

void bind_reply(nb::module_& module) {
  nb::class_<LoneReply>(module, "RelayReply", "A reply followed without sockets.")
      .def(nb::init<std::shared_ptr<Pool>, bool, nb::bytes, bool, const kv::answer::Due*>(),
           nb::arg("bounds"), nb::arg("head_request"), nb::arg("extra_lines"),
           nb::arg("keep_alive"), nb::arg("due").none() = nb::none())
      .def("feed", &LoneReply::feed, nb::arg("data"))
      .def("close", &LoneReply::close)
      .def_prop_ro("status", [](const LoneReply& it) { return it.reply.status(); })
      .def_prop_ro("done", [](const LoneReply& it) { return it.reply.done(); })
      .def_prop_ro("reusable",
                   [](const LoneReply& it) { return it.reply.reusable() && !it.reply.surplus(); })
      .def_prop_ro("closes", [](const LoneReply& it) { return it.reply.closes(); })
      .def_prop_ro("held_fault", [](const LoneReply& it) {
        return it.reply.failed() ? name_of(it.reply.held_failure().fault) : "";
      })
      .def_prop_ro("withholds", [](const LoneReply& it) { return it.reply.withholds(); })
      .def_prop_ro("begun", [](const LoneReply& it) { return it.reply.begun(); })
      .def_prop_ro("flaw", [](const LoneReply& it) { return it.reply.flaw(); })
      .def_prop_ro("refuses", [](const LoneReply& it) { return it.reply.refuses(); })
      .def_prop_ro("held", [](const LoneReply& it) { return it.reply.held(); })
      .def_prop_ro("held_body", [](const LoneReply& it) { return bytes_of(it.reply.held_body()); })
      .def_prop_ro("head", [](LoneReply& it) { return bytes_of(it.reply.head_for_client()); })
      .def_prop_ro("events", [](const LoneReply& it) { return it.reply.meter().events(); })
      .def_prop_ro("usage", [](const LoneReply& it) {
        return bytes_of(std::string(it.reply.meter().usage()));
      });
}

void bind_end(nb::module_& module) {
  nb::class_<End>(module, "RelayEnd", "What became of one request.")
      .def_prop_ro("fault", [](const End& end) { return name_of(end.failure.fault); })
      .def_prop_ro("message", [](const End& end) { return end.failure.message; })
      .def_ro("status", &End::status)
      .def_ro("bytes_to_client", &End::bytes_to_client)
      .def_ro("started_s", &End::started_s)
      .def_prop_ro("first_byte_s", [](const End& end) { return moment(end.first_byte_s); })
      .def_prop_ro("last_byte_s", [](const End& end) { return moment(end.last_byte_s); })
      .def_ro("events", &End::events)
      .def_prop_ro("usage", [](const End& end) { return bytes_of(end.usage); })
      .def_prop_ro("flaw", [](const End& end) { return end.flaw; })
      .def_ro("refused", &End::refused)
      .def_ro("stale", &End::stale)
      .def_ro("held", &End::held)
      .def_prop_ro("held_head", [](const End& end) { return bytes_of(end.held_head); })
      .def_prop_ro("held_body", [](const End& end) { return bytes_of(end.held_body); })
      .def_prop_ro("reason", [](const End& end) { return bytes_of(end.reason); })
      .def_ro("persistent", &End::persistent)
      .def_ro("ends_with_connection", &End::ends_with_connection)
      .def_ro("written", &End::written)
      .def_ro("journal", &End::journal)
      .def_prop_ro("unsent", [](const End& end) { return bytes_of(end.unsent); });
}

}  // namespace

void kv::bind_relay(nb::module_& module) {
  nb::class_<Pool>(module, "RelayPool", "The connections to one worker.")
      .def(nb::new_(&make_pool), nb::arg("max_connections"), nb::arg("idle_s"),
           nb::arg("header_bytes"), nb::arg("chunk_line_bytes"), nb::arg("held_bytes"),
           nb::arg("held_s"), nb::arg("tail_bytes"), nb::arg("progress_s"))
      .def_prop_ro("open", [](const Pool& pool) { return pool.open.load(); })
      .def_prop_ro("idle", [](const Pool& pool) { return pool.idle_count.load(); });

  nb::class_<Timeouts>(module, "RelayTimeouts", "How long each step may take, in seconds.")
      .def(nb::init<double, double, double, double, double>(), nb::arg("connect_s"),
           nb::arg("send_s"), nb::arg("first_byte_s"), nb::arg("between_s"), nb::arg("client_s"));

  bind_journal(module);
  bind_end(module);
  bind_reply(module);

  nb::class_<Borrower>(module, "Relay", "A thread that relays; the stub says how to use it.")
      .def(nb::init<>())
      .def_prop_ro("marks_fd", [](Borrower& self) { return self.relay().marks().fd(); })
      .def("set_addresses", &set_addresses, nb::arg("pool"), nb::arg("hosts"), nb::arg("port"))
      .def("submit", &Borrower::submit, nb::arg("pool"), nb::arg("head"), nb::arg("body"),
           nb::arg("head_request"), nb::arg("client_fd"), nb::arg("extra_lines"),
           nb::arg("keep_alive"), nb::arg("client_buffer_bytes"), nb::arg("timeouts"),
           nb::arg("tells"), nb::arg("journal").none(), nb::arg("due").none(),
           nb::arg("once") = false)
      .def("cancel", &Borrower::cancel, nb::arg("job"))
      .def("take", &Borrower::take)
      .def("abandon_silent", [](Borrower& self, const std::shared_ptr<Pool>& pool) {
             self.relay().abandon_silent(pool);
           }, nb::arg("pool"))
      .def("close", &Borrower::close, nb::arg("pool"))
      .def("stop", &Borrower::stop);
}
