// Memory of the device for a while, and the time of what runs on it: for the proof at load and the
// measures, which have no memory of XLA's.
#pragma once

#include <memory>

#include "cuda/launch.h"

namespace cadenza::cuda {

#ifdef CADENZA_EMULATED_GPU

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) : bytes_(new char[bytes]) {}
  char* data() const { return bytes_.get(); }

 private:
  std::unique_ptr<char[]> bytes_;
};

inline void use_device_of(const void*) {}

// Of the thread's context, while this lives.
class OwnStream {};

inline void finish_stream() {}
inline void copy_to_host(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
inline void fill_bytes(void* at, int value, size_t bytes) { std::memset(at, value, bytes); }

// A second for whatever runs: the time of emulated threads says nothing.
template <class Body>
double seconds_of(const Body& body) {
  body();
  return 1.0;
}

#else

// This thread computes on the device that has an array from now on: JAX's is another thread's.
inline void use_device_of(const void* array) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, array));
  check(cudaSetDevice(attributes.device));
}

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) { check(cudaMalloc(&at_, bytes)); }
  ~DeviceMemory() { cudaFree(at_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  char* data() const { return static_cast<char*>(at_); }

 private:
  void* at_ = nullptr;
};

class OwnStream {
 public:
  OwnStream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    context.stream = stream_;
  }
  ~OwnStream() {
    cudaStreamDestroy(stream_);
    context.stream = nullptr;
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

 private:
  cudaStream_t stream_ = nullptr;
};

inline void finish_stream() { check(cudaStreamSynchronize(context.stream)); }
inline void copy_to_host(void* to, const void* from, size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, context.stream));
  finish_stream();
}
inline void fill_bytes(void* at, int value, size_t bytes) {
  check(cudaMemsetAsync(at, value, bytes, context.stream));
}

template <class Body>
double seconds_of(const Body& body) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  check(cudaEventRecord(begin, context.stream));
  body();
  check(cudaEventRecord(end, context.stream));
  check(cudaEventSynchronize(end));
  float milliseconds = 0.0f;
  check(cudaEventElapsedTime(&milliseconds, begin, end));
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  return double(milliseconds) * 1e-3;
}

#endif

}  // namespace cadenza::cuda
