// What Python sees of the judge of answers.
#include "bindings.h"

#include <nanobind/stl/string.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#include "answer/judge.h"

namespace nb = nanobind;
using kv::answer::Due;
using kv::answer::Form;
using kv::answer::Judge;

namespace {

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

Due due_of(const std::string& form, bool tokens) {
  constexpr std::array<std::pair<std::string_view, Form>, 5> kForms = {
      {{"completions", Form::completions},
       {"responses", Form::responses},
       {"messages", Form::messages},
       {"generate", Form::generate},
       {"other", Form::other}}};
  for (const auto& [name, is] : kForms) {
    if (name == form) return {is, tokens};
  }
  throw std::invalid_argument("no form of answers: " + form);
}

// A judge that tells of its verdict. Lifetime: one reply.
struct PythonJudge {
  PythonJudge(const Due& due, bool event_stream, bool coded, std::size_t limit_bytes) {
    judge.begin(due, event_stream, coded, limit_bytes);
  }

  Judge judge;
};

}  // namespace

void kv::bind_answers(nb::module_& module) {
  nb::class_<Due>(module, "AnswerDue", "What a request's answer has to be.")
      .def("__init__", [](Due* due, const std::string& form, bool tokens) {
             new (due) Due(due_of(form, tokens));
           }, nb::arg("form"), nb::arg("tokens") = true,
           nb::sig("def __init__(self, form: str, tokens: bool = True) -> None"));

  nb::class_<PythonJudge>(module, "AnswerJudge", "Whether a reply of status 200 is an answer.")
      .def(nb::init<const Due&, bool, bool, std::size_t>(), nb::arg("due"),
           nb::arg("event_stream"), nb::arg("coded"), nb::arg("limit_bytes"),
           nb::sig("def __init__(self, due: AnswerDue, event_stream: bool, coded: bool, "
                   "limit_bytes: int) -> None"))
      .def("feed", [](PythonJudge& it, nb::bytes payload, bool last) {
             it.judge.feed(view_of(payload), last);
             return it.judge.verdict() != Judge::Verdict::open;
           }, nb::arg("payload"), nb::arg("last"))
      .def_prop_ro("answers", [](const PythonJudge& it) {
        return it.judge.verdict() == Judge::Verdict::answer;
      })
      .def_prop_ro("failure", [](const PythonJudge& it) { return it.judge.why(); })
      .def_prop_ro("refuses", [](const PythonJudge& it) { return it.judge.refuses(); })
      .def_prop_ro("pings", [](const PythonJudge& it) { return it.judge.pings(); });

  module.def("late_failure", [](nb::bytes tail) {
               return kv::answer::late_failure(view_of(tail));
             }, nb::arg("tail"), "Why a stream that began well failed; \"\" where it did not.");
}
