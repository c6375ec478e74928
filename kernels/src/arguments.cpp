#include "arguments.h"

#include <cstring>
#include <string>

namespace nb = nanobind;

namespace kv::arguments {
namespace {

nb::builtin_exception type_error(const std::string& what) { return nb::type_error(what.c_str()); }
nb::builtin_exception value_error(const std::string& what) { return nb::value_error(what.c_str()); }

std::string type_of(nb::handle object) {
  return nb::str(object.type().attr("__name__")).c_str();
}

nb::object index_of(nb::handle object, const char* name) {
  PyObject* index = PyNumber_Index(object.ptr());
  if (index == nullptr) {
    PyErr_Clear();
    throw type_error(std::string(name) + " must be an int, got " + type_of(object));
  }
  return nb::steal(index);
}

// Native or little-endian, and one of the wanted codes ("i" and "l" are both int32 somewhere).
bool format_is(const char* format, const char* wanted) {
  if (*format == '<' || *format == '=' || *format == '@') ++format;
  return *format != '\0' && format[1] == '\0' && std::strchr(wanted, *format) != nullptr;
}

}  // namespace

Buffer::Buffer(nb::handle object, const char* name, const Wanted& wanted) {
  if (PyObject_CheckBuffer(object.ptr()) == 0) {
    throw type_error(std::string(name) + " must be a buffer of " + wanted.type + ", got " +
                    type_of(object) + "; numpy.array(..., dtype=numpy." + wanted.type +
                    ") makes one");
  }
  if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_FULL_RO) != 0) throw nb::python_error();
  try {
    refuse(name, wanted);
  } catch (...) {
    PyBuffer_Release(&view_);  // no destructor runs for an object that was not made
    throw;
  }
}

void* Buffer::writable_data(const char* name) const {
  if (view_.readonly != 0) throw value_error(std::string(name) + " must be writable");
  return view_.buf;
}

Depths::Depths(nb::handle object, const char* name, std::size_t workers)
    : Buffer(object, name, {"int32", "il", 4}),
      values_(static_cast<std::int32_t*>(writable_data(name))) {
  if (size() != workers) {
    throw value_error(std::string(name) + " must have " + std::to_string(workers) +
                      " values, one a worker, got " + std::to_string(size()));
  }
}

void Buffer::refuse(const char* name, const Wanted& wanted) const {
  const std::string argument = name;
  const std::string format = view_.format == nullptr ? "B" : view_.format;
  const auto is_of = [&](const char* formats) { return format_is(format.c_str(), formats); };
  const bool fits = view_.itemsize == wanted.item_bytes && is_of(wanted.formats);
  if (!fits && !(view_.itemsize == 8 && is_of(wanted.wide_formats))) {
    throw type_error(argument + " must be a buffer of " + wanted.type + ", got format '" + format +
                    "' of " + std::to_string(view_.itemsize) + " bytes");
  }
  if (view_.ndim != 1) {
    throw value_error(argument + " must have 1 dimension, got " + std::to_string(view_.ndim));
  }
  if (PyBuffer_IsContiguous(&view_, 'C') == 0) {
    throw value_error(argument + " must be C-contiguous, got a strided view; "
                                "numpy.ascontiguousarray(...) copies it");
  }
}

Media::Media(nb::handle object, const char* name) {
  if (PySequence_Check(object.ptr()) == 0) {
    throw type_error(std::string(name) + " must be a sequence, got " + type_of(object));
  }
  for (nb::handle item : object) add(item, name);
}

void Media::add(nb::handle item, const char* name) {
  if (!nb::isinstance<nb::tuple>(item) || nb::len(item) != 3) {
    throw type_error(std::string(name) + " must have tuples (identifier, offset, length)");
  }
  const nb::object identifier = item[0];
  if (!nb::isinstance<nb::str>(identifier)) {
    throw type_error("an identifier must be a str, got " + type_of(identifier));
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(identifier.ptr(), &size);
  if (text == nullptr) throw nb::python_error();
  const std::int64_t offset = in_range(item[1], "an offset", 0, INT32_MAX);
  const std::int64_t length = in_range(item[2], "a length", 0, INT32_MAX);
  if (!media_.empty() && offset < media_.back().offset) {
    throw value_error(std::string(name) + " must be in the order of their offsets");
  }
  media_.push_back({{text, static_cast<std::size_t>(size)}, offset, length});
}

std::int64_t integer(nb::handle object, const char* name) {
  const nb::object index = index_of(object, name);
  int overflow = 0;
  const std::int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) return overflow > 0 ? INT64_MAX : INT64_MIN;
  return value;
}

std::int64_t in_range(nb::handle object, const char* name, std::int64_t least, std::int64_t most) {
  const std::int64_t value = integer(object, name);
  if (value < least || value > most) {
    throw value_error(std::string(name) + " must be " + std::to_string(least) + ".." +
                      std::to_string(most) + ", got " + nb::str(object).c_str());
  }
  return value;
}

double number(nb::handle object, const char* name) {
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw type_error(std::string(name) + " must be a float, got " + type_of(object));
  }
  return value;
}

std::uint64_t uint64(nb::handle object, const char* name) {
  const nb::object index = index_of(object, name);
  const std::uint64_t value = PyLong_AsUnsignedLongLong(index.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw value_error(std::string(name) + " must be a uint64, got " + nb::str(index).c_str());
  }
  return value;
}

std::size_t full_blocks(std::size_t tokens, std::int64_t block_size) {
  if (block_size < 1) {
    throw value_error("block_size must be at least 1, got " + std::to_string(block_size));
  }
  return tokens / static_cast<std::size_t>(block_size);
}

}  // namespace kv::arguments
