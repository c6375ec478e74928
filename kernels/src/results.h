// A numpy array of our own as a result: written with the GIL released, then handed over.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>

namespace kv {

// Lifetime: request (one call), until `give` passes the memory on to Python.
template <class T>
class Result {
 public:
  using Array = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;

  explicit Result(std::size_t size) : size_(size), values_(new T[size]) {}

  T* data() { return values_.get(); }

  Array give() {
    T* values = values_.release();
    const auto free = [](void* memory) noexcept { delete[] static_cast<T*>(memory); };
    nanobind::capsule owner(values, free);
    return Array(values, {size_}, owner);
  }

 private:
  std::size_t size_;
  std::unique_ptr<T[]> values_;
};

}  // namespace kv
