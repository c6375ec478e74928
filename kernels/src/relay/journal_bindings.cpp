#include "bindings.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "relay/journal.h"

namespace nb = nanobind;
using kv::relay::Journal;
using kv::relay::JournalTerms;
using kv::relay::TokenRoom;

namespace {

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::bytes bytes_of(std::string_view text) { return nb::bytes(text.data(), text.size()); }

nb::bytes bytes_of(const std::vector<std::int32_t>& ids) {
  return nb::bytes(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(std::int32_t));
}

std::shared_ptr<JournalTerms> make_terms(std::shared_ptr<TokenRoom> room, nb::bytes hidden,
                                         nb::bytes migratable_line) {
  return std::make_shared<JournalTerms>(JournalTerms{
      std::move(room), std::string(view_of(hidden)), std::string(view_of(migratable_line))});
}

std::shared_ptr<Journal> make_journal(std::shared_ptr<JournalTerms> terms) {
  return std::make_shared<Journal>(std::move(terms));
}

nb::bytes feed(Journal& self, nb::bytes payload) {
  std::string out;
  self.feed(view_of(payload), out);
  return bytes_of(out);
}

nb::bytes flush(Journal& self) {
  std::string out;
  self.flush(out);
  return bytes_of(out);
}

}  // namespace

void kv::bind_journal(nb::module_& module) {
  nb::class_<TokenRoom>(module, "RelayRoom", "How many token ids streams may keep.")
      .def(nb::init<std::int64_t, std::int64_t>(), nb::arg("stream_tokens"), nb::arg("tokens"))
      .def_prop_rw("stream_tokens", [](const TokenRoom& room) { return room.stream_tokens.load(); },
                   [](TokenRoom& room, std::int64_t tokens) { room.stream_tokens = tokens; })
      .def_prop_rw("tokens", [](const TokenRoom& room) { return room.tokens.load(); },
                   [](TokenRoom& room, std::int64_t tokens) { room.tokens = tokens; })
      .def_prop_ro("taken", &TokenRoom::taken)
      .def("take", &TokenRoom::take, nb::arg("more"), nb::arg("of_stream"))
      .def("give", &TokenRoom::give, nb::arg("tokens"));

  nb::class_<JournalTerms>(module, "RelayJournalTerms", "What streams by events have in common.")
      .def(nb::new_(&make_terms), nb::arg("room"), nb::arg("hidden"),
           nb::arg("migratable_line"));

  nb::class_<Journal>(module, "RelayJournal", "What is remembered of a stream's first worker.")
      .def(nb::new_(&make_journal), nb::arg("terms"))
      .def("feed", &feed, nb::arg("payload"))
      .def("flush", &flush)
      .def("leave_room", &Journal::leave_room)
      .def_prop_ro("prompt", [](const Journal& it) { return bytes_of(it.prompt()); })
      .def_prop_ro("said", [](const Journal& it) { return bytes_of(it.said()); })
      .def_prop_ro("prompt_tokens", &Journal::prompt_tokens)
      .def_prop_ro("prefix", [](const Journal& it) {
             return it.prefixed() ? nb::object(bytes_of(it.prefix())) : nb::none();
           })
      .def_prop_ro("unfit", &Journal::unfit)
      .def_prop_ro("finished", &Journal::finished)
      .def_prop_ro("complete", &Journal::complete)
      .def_prop_ro("miscounted", &Journal::miscounted)
      .def_prop_ro("opened", &Journal::opened)
      .def_prop_ro("usage_sent", &Journal::usage_sent)
      .def_prop_ro("failure", [](const Journal& it) { return it.failure().message; });
}
