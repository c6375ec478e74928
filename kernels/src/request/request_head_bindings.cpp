#include "bindings.h"

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "request/request_head.h"

namespace nb = nanobind;

namespace {

// A head, and the text that it views. Immutable. Lifetime: request.
struct KeptHead {
  nb::bytes text;
  kv::PlainHead head;
};

constexpr std::string_view kInternalPrefix = "x-warmroute-internal-";

nb::object str_of(std::string_view text, const char* errors) {
  PyObject* made =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), errors);
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

nb::bytes bytes_of(std::string_view text) { return nb::bytes(text.data(), text.size()); }

std::string_view name_of(nb::handle name) {
  Py_ssize_t size = 0;
  const char* utf8 =
      PyUnicode_Check(name.ptr()) ? PyUnicode_AsUTF8AndSize(name.ptr(), &size) : nullptr;
  if (utf8 != nullptr) return {utf8, static_cast<std::size_t>(size)};
  PyErr_Clear();
  throw nb::type_error("name must be a text without lone surrogates");
}

}  // namespace

namespace calls {

nb::object plain_head(nb::handle text) {
  if (!PyBytes_Check(text.ptr())) throw nb::type_error("text must be bytes");
  const auto bytes = nb::borrow<nb::bytes>(text);
  std::optional<kv::PlainHead> head = kv::read_plain_head({bytes.c_str(), bytes.size()});
  if (!head) return nb::none();
  const auto& [method, target, fields, length, last] = *head;
  const nb::object line[] = {str_of(method, nullptr), str_of(target, nullptr)};
  const nb::int_ bytes_to_come(length);
  const nb::bool_ ends(last);
  return nb::make_tuple(KeptHead{bytes, std::move(*head)}, line[0], line[1], bytes_to_come, ends);
}

// Bytes that are no UTF-8 stand as lone surrogates, as in aiohttp's requests.
nb::object get(const KeptHead& kept, nb::handle name) {
  const auto value = kept.head.get(name_of(name));
  return value ? str_of(*value, "surrogateescape") : nb::none();
}

nb::tuple fields(const KeptHead& kept) {
  nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(kept.head.fields.size())));
  if (!made.is_valid()) throw nb::python_error();
  Py_ssize_t at = 0;
  for (const kv::HeadField& field : kept.head.fields) {
    nb::tuple one = nb::make_tuple(bytes_of(field.name), bytes_of(field.value));
    // Takes the reference also where it fails, and of the stable ABI, unlike the macro.
    if (PyTuple_SetItem(made.ptr(), at++, one.release().ptr()) != 0) throw nb::python_error();
  }
  return nb::borrow<nb::tuple>(made);
}

nb::object among(const KeptHead& kept, nb::handle names) {
  if (!PyFrozenSet_Check(names.ptr())) throw nb::type_error("names must be a frozenset of texts");
  nb::object found = nb::none();
  std::string lower;
  for (const kv::HeadField& field : kept.head.fields) {
    lower.assign(field.name);
    for (char& c : lower) {
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 32);
    }
    const nb::object name = str_of(lower, nullptr);
    const int wanted = PySet_Contains(names.ptr(), name.ptr());
    if (wanted < 0) throw nb::python_error();
    if (wanted == 0) continue;
    if (found.is_none()) found = nb::dict();
    const int known = PyDict_Contains(found.ptr(), name.ptr());
    if (known < 0) throw nb::python_error();
    if (known > 0) continue;
    const nb::object value = str_of(field.value, "surrogateescape");
    if (PyDict_SetItem(found.ptr(), name.ptr(), value.ptr()) != 0) throw nb::python_error();
  }
  return found;
}

// The lines that a worker gets: `skip` holds names in small letters that it does not get.
nb::bytes lines(const KeptHead& kept, nb::handle skip) {
  if (!PyFrozenSet_Check(skip.ptr())) throw nb::type_error("skip must be a frozenset of bytes");
  std::string text, lower;
  for (const kv::HeadField& field : kept.head.fields) {
    lower.assign(field.name);
    for (char& c : lower) {
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 32);
    }
    if (lower.starts_with(kInternalPrefix)) continue;
    const int skipped = PySet_Contains(skip.ptr(), bytes_of(lower).ptr());
    if (skipped < 0) throw nb::python_error();
    if (skipped > 0) continue;
    text.append(field.name).append(": ").append(field.value).append("\r\n");
  }
  return bytes_of(text);
}

}  // namespace calls

namespace kv {

void bind_request_head(nb::module_& module) {
  const auto arg = [](const char* name) { return nb::arg(name).none(); };
  nb::class_<KeptHead>(module, "PlainHead")
      .def("get", calls::get, arg("name"), nb::sig("def get(self, name: str) -> str | None"),
           "The first value under a name, whose letters count without case.")
      .def("fields", calls::fields,
           nb::sig("def fields(self) -> tuple[tuple[bytes, bytes], ...]"),
           "Names and values as they came, blanks round the values left out.")
      .def("among", calls::among, arg("names"),
           nb::sig("def among(self, names: frozenset[str]) -> dict[str, str] | None"),
           "The first value of each header whose name in small letters is in `names`; None: none.")
      .def("lines", calls::lines, arg("skip"),
           nb::sig("def lines(self, skip: frozenset[bytes]) -> bytes"),
           "The headers as lines with CRLF, but for names that are in `skip` in small letters, "
           "and internal ones.");
  module.def("plain_head", calls::plain_head, arg("text"),
             nb::sig("def plain_head(text: bytes) -> tuple[PlainHead, str, str, int, bool] | None"),
             "A head that goes on as it came; None: read it in another way.");
}

}  // namespace kv
