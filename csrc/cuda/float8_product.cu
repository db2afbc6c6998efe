// Products with weights of e4m3 codes, packed as for the CPU.
#include "cuda/float8_tile.h"
#include "cuda/grouped_product.h"

namespace cadenza::cuda {

namespace {

struct Float8Product {
  PanelProduct panels;
  const void* x;
  int64_t x_stride;  // elements from row to row
  int64_t x_bytes;   // of a head
  int64_t panel_size;
  int blocks;
  bool has_pairs;
};

template <class Math, int NR>
__global__ void __launch_bounds__(kPanelWarps* kWarp, 2) float8_kernel(Float8Product product) {
  using T = typename Math::T;
  auto& memory = *shared_memory<Float8Memory<NR>>();
  const PanelTile tile = panel_tile(product.panels, kRowsOfProduct * NR);
  if (tile.rows == 0) return;
  if (int(threadIdx.x) < kRowsOfProduct * NR) {
    const int target = target_row(product.panels, tile, int(threadIdx.x));
    const char* x = static_cast<const char*>(product.x) + blockIdx.z * product.x_bytes;
    memory.targets[threadIdx.x] = target;
    memory.sources[threadIdx.x] =
        reinterpret_cast<const T*>(x) + int64_t(target / product.panels.pairs_of_row) * product.x_stride;
  }
  __syncthreads();
  const uint8_t* panel = product.panels.w + tile.weight * product.panels.w_bytes + blockIdx.x * product.panel_size;
  PanelSums<NR> sums;
  multiply_float8<Math, NR>(memory, {product.panels.k, product.blocks, tile.rows, product.has_pairs, panel}, sums);
  finish_panel<NR>(product.panels, tile, memory.targets, sums);
}

template <template <int> class Math>
void launch_as(const Float8Product& product, int height, dim3 grid) {
  constexpr unsigned kThreads = kPanelWarps * kWarp;
  if (height <= 8) {
    launch(float8_kernel<Math<1>, 1>, grid, kThreads, sizeof(Float8Memory<1>), product);
  } else if (height <= 16) {
    launch(float8_kernel<Math<2>, 2>, grid, kThreads, sizeof(Float8Memory<2>), product);
  } else {
    launch(float8_kernel<Math<4>, 4>, grid, kThreads, sizeof(Float8Memory<4>), product);
  }
}

void launch_product(const ProductTask& task, const Float8Product& product, int height, dim3 grid) {
  if (task.x_type == DType::kF32) return launch_as<Float8Chains>(product, height, grid);
  launch_as<Float8Tensors>(product, height, grid);
}

Float8Product product_of(const ProductTask& task) {
  const bool has_pairs = (task.row_of_x() | task.k) % 2 == 0 && task.heads.x_bytes % 4 == 0;
  return {panel_product(task),
          task.x,
          task.row_of_x(),
          task.heads.x_bytes,
          panel_bytes(WeightFormat::kFloat8, task.k),
          int(ceil_div(task.k, kFloat8Block)),
          has_pairs};
}

}  // namespace

void float8_product(const ProductTask& task, Workspace&) {
  const int height = panel_height(task.rows);
  launch_product(task, product_of(task), height, panel_grid(task, ceil_div(task.rows, height)));
}

void float8_product_of_experts(const ProductTask& task, const ChosenExperts& chosen, int64_t pairs_of_row,
                               Workspace& workspace) {
  Float8Product product = product_of(task);
  const int height = group_panels(product.panels, task, chosen, pairs_of_row, workspace);
  product.panels.w_bytes = ceil_div(task.n, kPanel) * product.panel_size;
  launch_product(task, product, height, panel_grid(task, product.panels.grouped.most_tiles));
}

bool float8_fits(const Weight& w, int first, int64_t n, int64_t k) {
  return w.rank == first + 4 && w.shape[first] == ceil_div(n, kPanel) &&
         w.shape[first + 1] == panel_bytes(WeightFormat::kFloat8, k) / kFloat8StepBytes &&
         w.shape[first + 2] == kPanel && w.shape[first + 3] == 2;
}

}  // namespace cadenza::cuda
