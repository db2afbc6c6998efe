// The graphs that were recorded, the newest kept.
#include "cuda/graphs.h"

#include <list>
#include <map>
#include <mutex>
#include <utility>

namespace cadenza::cuda {

#ifdef CADENZA_EMULATED_GPU

void run_as_graph(GraphKey, const std::function<bool()>& body) { body(); }

#else

namespace {

// Several for each bucket, whose inputs and results alternate between a few places.
constexpr size_t kMostKeys = 512;

class Graphs {
 public:
  // Of a key: whether it was seen before, and its graph, if one was recorded.
  struct Found {
    bool is_known;
    cudaGraphExec_t graph;
  };
  Found find(const GraphKey& key) {
    const auto found = places_.find(key);
    if (found == places_.end()) return {false, nullptr};
    order_.splice(order_.begin(), order_, found->second);
    return {true, found->second->second};
  }

  void add(const GraphKey& key) {
    order_.emplace_front(key, nullptr);
    places_[key] = order_.begin();
    if (order_.size() <= kMostKeys) return;
    places_.erase(order_.back().first);
    // One that runs is freed when it has ended.
    if (order_.back().second != nullptr) check(cudaGraphExecDestroy(order_.back().second));
    order_.pop_back();
  }

  void set(const GraphKey& key, cudaGraphExec_t graph) { places_.at(key)->second = graph; }

 private:
  std::list<std::pair<GraphKey, cudaGraphExec_t>> order_;
  std::map<GraphKey, decltype(order_)::iterator> places_;
};

std::mutex mutex;

// Of each device.
Graphs& graphs() {
  static std::map<int, Graphs> all;
  int device = 0;
  check(cudaGetDevice(&device));
  return all[device];
}

// What the body launches, or null if it failed.
cudaGraphExec_t record(const std::function<bool()>& body) {
  check(cudaStreamBeginCapture(context.stream, cudaStreamCaptureModeThreadLocal));
  bool holds = false;
  cudaGraph_t graph = nullptr;
  try {
    holds = body();
  } catch (...) {
    cudaStreamEndCapture(context.stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(context.stream, &graph));
  cudaGraphExec_t made = nullptr;
  if (holds) check(cudaGraphInstantiate(&made, graph, 0));
  check(cudaGraphDestroy(graph));
  return made;
}

}  // namespace

void run_as_graph(GraphKey key, const std::function<bool()>& body) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(context.stream, &status));
  if (status != cudaStreamCaptureStatusNone) {
    body();
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  Graphs::Found found = graphs().find(key);
  if (!found.is_known) {  // addresses that may never recur are not worth a graph
    graphs().add(key);
    body();
    return;
  }
  if (found.graph == nullptr) {
    found.graph = record(body);
    if (found.graph == nullptr) return;
    graphs().set(key, found.graph);
  }
  check(cudaGraphLaunch(found.graph, context.stream));
}

#endif

}  // namespace cadenza::cuda
