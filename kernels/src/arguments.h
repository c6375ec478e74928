// Python arguments in, checked: what fails is a TypeError or ValueError that names the argument,
// what came and what is wanted. Everything here needs the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <vector>

#include "base/chain_media.h"

namespace kv::arguments {

// A borrowed C-contiguous 1-D buffer, read in place. Lifetime: request (one call); the exporter
// cannot free or resize its memory meanwhile.
class Buffer {
 public:
  struct Wanted {
    const char* type;     // as told to people
    const char* formats;  // struct-module codes of it, whatever the platform calls it
    Py_ssize_t item_bytes;
    const char* wide_formats = "";  // of items of eight bytes that will do as well
  };

  Buffer(nanobind::handle object, const char* name, const Wanted& wanted);
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

 protected:
  const void* data() const { return view_.buf; }
  void* writable_data(const char* name) const;
  std::size_t size() const { return static_cast<std::size_t>(view_.len / view_.itemsize); }
  Py_ssize_t item_bytes() const { return view_.itemsize; }

 private:
  void refuse(const char* name, const Wanted& wanted) const;

  Py_buffer view_{};
};

// int32 token ids.
class Tokens : public Buffer {
 public:
  Tokens(nanobind::handle object, const char* name) : Buffer(object, name, {"int32", "il", 4}) {}
  std::span<const std::int32_t> span() const {
    return {static_cast<const std::int32_t*>(data()), size()};
  }
};

// int64 token ids.
class WideTokens : public Buffer {
 public:
  WideTokens(nanobind::handle object, const char* name)
      : Buffer(object, name, {"int64", "ql", 8}) {}
  std::span<const std::int64_t> span() const {
    return {static_cast<const std::int64_t*>(data()), size()};
  }
};

// Token ids, int32 or int64.
class AnyTokens : public Buffer {
 public:
  AnyTokens(nanobind::handle object, const char* name)
      : Buffer(object, name, {"int32", "il", 4, "ql"}) {}
  bool is_wide() const { return item_bytes() == 8; }
  std::span<const std::int32_t> narrow() const {
    return {static_cast<const std::int32_t*>(data()), is_wide() ? 0 : size()};
  }
  std::span<const std::int64_t> wide() const {
    return {static_cast<const std::int64_t*>(data()), is_wide() ? size() : 0};
  }
  using Buffer::size;
};

// int32 numbers of blocks, one a worker, to write to.
class Depths : public Buffer {
 public:
  // ValueError unless there are so many, and their owner lets them be written to.
  Depths(nanobind::handle object, const char* name, std::size_t workers);
  std::int32_t* data() const { return values_; }

 private:
  std::int32_t* values_;
};

// uint64 chain hashes.
class Hashes : public Buffer {
 public:
  Hashes(nanobind::handle object, const char* name) : Buffer(object, name, {"uint64", "QL", 8}) {}
  std::span<const std::uint64_t> span() const {
    return {static_cast<const std::uint64_t*>(data()), size()};
  }
};

// Bytes of a file or a message.
class Bytes : public Buffer {
 public:
  Bytes(nanobind::handle object, const char* name) : Buffer(object, name, {"uint8", "B", 1}) {}
  std::span<const std::uint8_t> span() const {
    return {static_cast<const std::uint8_t*>(data()), size()};
  }
};

// int64 numbers.
class Counts : public Buffer {
 public:
  Counts(nanobind::handle object, const char* name) : Buffer(object, name, {"int64", "lq", 8}) {}
  std::span<const std::int64_t> span() const {
    return {static_cast<const std::int64_t*>(data()), size()};
  }

  // The same to write to, or ValueError where its owner forbids that.
  std::span<std::int64_t> writable(const char* name) const {
    return {static_cast<std::int64_t*>(writable_data(name)), size()};
  }
};

// Truth values.
class Flags : public Buffer {
 public:
  Flags(nanobind::handle object, const char* name) : Buffer(object, name, {"bool", "?", 1}) {}
  std::span<const bool> span() const { return {static_cast<const bool*>(data()), size()}; }
};

// float64 numbers.
class Column : public Buffer {
 public:
  Column(nanobind::handle object, const char* name) : Buffer(object, name, {"float64", "d", 8}) {}
  std::span<const double> span() const { return {static_cast<const double*>(data()), size()}; }

  // The same to write to, or ValueError where its owner forbids that.
  std::span<double> writable(const char* name) const {
    return {static_cast<double*>(writable_data(name)), size()};
  }
};

// Tuples (identifier, offset, length), in the order of their offsets. Lifetime: request (one call).
class Media {
 public:
  Media(nanobind::handle object, const char* name);
  std::span<const Medium> span() const { return media_; }

 private:
  void add(nanobind::handle item, const char* name);

  std::vector<Medium> media_;
};

// A Python int (or what has __index__), clamped to int64: no legal value lies beyond.
std::int64_t integer(nanobind::handle object, const char* name);

// The same, or ValueError unless it is within both limits.
std::int64_t in_range(nanobind::handle object, const char* name, std::int64_t least,
                      std::int64_t most);

// A Python float (or what has __float__).
double number(nanobind::handle object, const char* name);

// A Python int in 0..2^64-1.
std::uint64_t uint64(nanobind::handle object, const char* name);

// The full blocks in `tokens` when split by `block_size`, which must be at least 1.
std::size_t full_blocks(std::size_t tokens, std::int64_t block_size);

}  // namespace kv::arguments
