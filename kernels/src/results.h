// A numpy array of our own as a result: written with the GIL released, then handed over.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <utility>

namespace kv {

// Lifetime: request (one call), until `give` passes the memory on to Python.
template <class T>
class Result {
 public:
  using Array = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;
  using Table = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<2>>;

  explicit Result(std::size_t size) : size_(size), values_(new T[size]) {}

  T* data() { return values_.get(); }

  Array give() {
    const auto [values, owner] = release();
    return Array(values, {size_}, owner);
  }

  // As a table of so many rows, row after row in memory.
  Table give_rows(std::size_t rows) {
    const auto [values, owner] = release();
    return Table(values, {rows, size_ / rows}, owner);
  }

 private:
  std::pair<T*, nanobind::capsule> release() {
    T* values = values_.release();
    const auto free = [](void* memory) noexcept { delete[] static_cast<T*>(memory); };
    return {values, nanobind::capsule(values, free)};
  }

  std::size_t size_;
  std::unique_ptr<T[]> values_;
};

}  // namespace kv
