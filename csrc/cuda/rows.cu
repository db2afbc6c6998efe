// What copies or converts rows: the embedding, a gather, rounding, and gates of a layer's inputs.
//
// A thread has some elements side by side of one row; a row has as many blocks as its width needs.
#include "cuda/bodies.h"
#include "cuda/code_embed.h"
#include "cuda/elements.h"
#include "cuda/math.h"

namespace cadenza::cuda {

namespace {

constexpr unsigned kThreads = 128;

struct Rows {
  const int32_t* count;
  int width;
};

// The thread's first element of its block's row; -1 if it has none.
template <int N>
__device__ __forceinline__ int own_element(const Rows& rows) {
  const int at = int(blockIdx.y * blockDim.x + threadIdx.x) * N;
  return at < rows.width && int(blockIdx.x) < *rows.count ? at : -1;
}

template <class Kernel, class... A>
void launch_rows(Kernel* kernel, int64_t rows, int side_by_side, const Rows& task, A... arguments) {
  const int64_t blocks = ceil_div(task.width, int64_t(kThreads) * side_by_side);
  launch_early(kernel, dim3{unsigned(rows), unsigned(blocks)}, kThreads, 0, task, arguments...);
}

struct Table {
  const int32_t* token_ids;
  int vocab;
  float scale;
};

template <class T, int N>
__global__ void embed_kernel(Rows rows, Table table, const T* weights, float* out) {
  take_turn();
  const int at = own_element<N>(rows);
  if (at < 0) return;
  const int token = table.token_ids[blockIdx.x];
  float values[N] = {};
  if (token >= 0 && token < table.vocab) load_elements<N>(weights + int64_t(token) * rows.width + at, values);
  for (float& value : values) value *= table.scale;
  store_elements<N>(out + int64_t(blockIdx.x) * rows.width + at, values);
}

template <int N>
__global__ void convert_kernel(Rows rows, const float* x, bf16* out) {
  take_turn();
  const int at = own_element<N>(rows);
  if (at < 0) return;
  const int64_t place = int64_t(blockIdx.x) * rows.width + at;
  float values[N];
  load_elements<N>(x + place, values);
  store_elements<N>(out + place, values);
}

struct Gates {
  const float* inputs;  // [rows, width]
  int width, first;
  Activation activation;
};

template <class T, int N>
__global__ void gate_kernel(Rows rows, Gates gates, const float* x, T* out) {
  take_turn();
  const int at = own_element<N>(rows);
  if (at < 0) return;
  const int64_t place = int64_t(blockIdx.x) * rows.width + at;
  float values[N], inputs[N];
  load_elements<N>(x + place, values);
  load_elements<N>(gates.inputs + int64_t(blockIdx.x) * gates.width + gates.first + at, inputs);
  for (int i = 0; i < N; i++) values[i] = gated(gates.activation, values[i], inputs[i]);
  store_elements<N>(out + place, values);
}

struct Sources {
  const int32_t* indices;
  int count;
};

// Copies words, of which a row has `width`; bits are kept as they are.
template <class Word>
__global__ void take_kernel(Rows rows, Sources sources, const Word* x, Word* out) {
  take_turn();
  const int at = own_element<1>(rows);
  if (at < 0) return;
  const int from = sources.indices[blockIdx.x];
  const bool is_there = from >= 0 && from < sources.count;
  out[int64_t(blockIdx.x) * rows.width + at] = is_there ? x[int64_t(from) * rows.width + at] : Word{};
}

template <class T>
void embed(const Rows& task, int64_t rows, const Table& table, const void* weights, float* out) {
  const T* typed = static_cast<const T*>(weights);
  if (has_whole_vectors(task.width)) {
    launch_rows(embed_kernel<T, kSideBySide>, rows, kSideBySide, task, table, typed, out);
  } else {
    launch_rows(embed_kernel<T, 1>, rows, 1, task, table, typed, out);
  }
}

template <class T>
void gate_inputs(const Rows& task, int64_t rows, const Gates& gates, const float* x, void* out) {
  T* typed = static_cast<T*>(out);
  if (has_whole_vectors(task.width) && has_whole_vectors(gates.width) && has_whole_vectors(gates.first)) {
    launch_rows(gate_kernel<T, kSideBySide>, rows, kSideBySide, task, gates, x, typed);
  } else {
    launch_rows(gate_kernel<T, 1>, rows, 1, task, gates, x, typed);
  }
}

template <class Word>
void take_rows(Rows task, int64_t rows, const Sources& sources, const void* x, void* out) {
  task.width /= int(sizeof(Word));
  launch_rows(take_kernel<Word>, rows, 1, task, sources, static_cast<const Word*>(x), static_cast<Word*>(out));
}

}  // namespace

}  // namespace cadenza::cuda

namespace cadenza::xla_ffi {

namespace {

using cuda::rows_to_compute;

bool is_f32(const Any& buffer) { return buffer.element_type() == ffi::F32; }

// The rows to compute of a result, of which operands may have fewer.
int64_t shared_rows(const Any& out, const Any& x) {
  return rows_to_compute(std::min(dim(out, 0), dim(x, 0)));
}

void embed_from_codes(const calls::embed& c) {
  require(is_f32(c.out), "the result must be f32");
  require(cuda::codes_fit(weight_of(c.table), 0, c.vocab, dim(c.out, 1)), "the table must be packed codes");
  cuda::embed_codes({int32(c.token_ids), device_count(c.count), shared_rows(c.out, c.token_ids), dim(c.out, 1), c.vocab,
                     c.table.untyped_data(), c.scale, static_cast<float*>(c.out.untyped_data())});
}

}  // namespace

// The table is [V, E], as checkpoints have it, or packed codes.
void execute(const calls::embed& c) {
  const cuda::Rows task{device_count(c.count), int(dim(c.out, 1))};
  if (is_quantised(weight_format(c.table))) return embed_from_codes(c);
  require(c.table.dimensions().size() == 2 && dim(c.table, 0) == c.vocab && dim(c.table, 1) == task.width,
          "the table must be [vocab, width]");
  require(is_f32(c.out), "the result must be f32");
  const cuda::Table given{int32(c.token_ids), int(c.vocab), c.scale};
  const int64_t rows = shared_rows(c.out, c.token_ids);
  auto* to = static_cast<float*>(c.out.untyped_data());
  if (element_type(c.table) == DType::kBf16) {
    cuda::embed<bf16>(task, rows, given, c.table.untyped_data(), to);
  } else {
    cuda::embed<float>(task, rows, given, c.table.untyped_data(), to);
  }
}

void execute(const calls::convert& c) {
  const cuda::Rows task{device_count(c.count), int(dim(c.out, 1))};
  require(is_f32(c.x) && dim(c.x, 1) == task.width, "x must be f32 [T, N]");
  require(element_type(c.out) == DType::kBf16, "the result must be bf16");
  const auto* from = data<float>(c.x);
  auto* to = static_cast<bf16*>(c.out.untyped_data());
  if (cuda::has_whole_vectors(task.width)) {
    constexpr int kSide = cuda::kSideBySide;
    cuda::launch_rows(cuda::convert_kernel<kSide>, shared_rows(c.out, c.x), kSide, task, from, to);
  } else {
    cuda::launch_rows(cuda::convert_kernel<1>, shared_rows(c.out, c.x), 1, task, from, to);
  }
}

void execute(const calls::gate_inputs& c) {
  const cuda::Rows task{device_count(c.count), int(dim(c.out, 1))};
  require(is_f32(c.x) && is_f32(c.inputs) && dim(c.x, 1) == task.width, "x must be f32 [T, P]");
  require(c.first >= 0 && c.first + task.width <= dim(c.inputs, 1), "first is outside the inputs");
  require(c.activation >= 0 && c.activation < kNumActivations, "the activation is none of its kinds");
  const cuda::Gates gates{data<float>(c.inputs), int(dim(c.inputs, 1)), int(c.first),
                          static_cast<Activation>(c.activation)};
  const int64_t rows = std::min(shared_rows(c.out, c.x), dim(c.inputs, 0));
  if (element_type(c.out) == DType::kBf16) {
    cuda::gate_inputs<bf16>(task, rows, gates, data<float>(c.x), c.out.untyped_data());
  } else {
    cuda::gate_inputs<float>(task, rows, gates, data<float>(c.x), c.out.untyped_data());
  }
}

void execute(const calls::take_rows& c) {
  require(c.out.element_type() == c.x.element_type() && dim(c.out, 1) == dim(c.x, 1),
          "the result must have x's type and width");
  const cuda::Rows task{device_count(c.count), int(dim(c.x, 1) * bytes_of(element_type(c.x)))};
  const cuda::Sources sources{int32(c.indices), int(dim(c.x, 0))};
  const int64_t rows = shared_rows(c.out, c.indices);
  if (task.width % int(sizeof(uint4)) == 0) {
    cuda::take_rows<uint4>(task, rows, sources, c.x.untyped_data(), c.out.untyped_data());
  } else {
    cuda::take_rows<uint16_t>(task, rows, sources, c.x.untyped_data(), c.out.untyped_data());
  }
}

// The memory of a GPU has no pages to place.
void execute(const calls::reserve&) {}

}  // namespace cadenza::xla_ffi
