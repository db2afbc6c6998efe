#include "core/quantised.h"

#include <algorithm>

namespace cadenza {

ProductKernels product_kernels(const Runtime& runtime, ProductTypes types) {
  const int weight = index_of(types.weight), act = index_of(types.activation);
  if (types.weight == WeightFormat::kFloat8) {
    const Float8Kernels& table = runtime.kernels.float8;
    return {table.max_rows,           table.linear[act],         table.gated[act],
            table.logits[act],        table.grouped_gated[act],  table.grouped_linear[act],
            table.combine[act],       table.head_linear[act]};
  }
  if (!is_quantised(types.weight)) {
    const KernelTable& table = runtime.kernels;
    return {table.max_rows[weight], table.linear[weight],        table.gated[weight],
            table.logits[weight],   table.grouped_gated[weight], table.grouped_linear[weight],
            table.combine[weight],  table.head_linear[weight]};
  }
  const IntegerKernels& table = runtime.integer;
  return {table.max_rows,     table.linear[act],        table.gated[act],
          table.logits,       table.grouped_gated[act], table.grouped_linear,
          table.combine[act], table.head_linear[act]};
}

int64_t activation_row_bytes(ProductTypes types, int64_t k) {
  return k * (types.activation == DType::kF32 ? 4 : 2);
}

int64_t product_row_bytes(ProductTypes types, int64_t k) {
  return is_quantised(types.weight) ? code_row_bytes(k) : activation_row_bytes(types, k);
}

const void* quantise_rows(const Runtime& runtime, Executor::Lease& lease, ProductTypes types,
                          QuantiseTask task) {
  task.out = lease.scratch().take<uint8_t>(task.rows * code_row_bytes(task.k));
  lease.run({runtime.integer.quantise[index_of(types.activation)], &task, task.rows, 16},
            task.rows * task.k > kMinParallelElements);
  return task.out;
}

const void* product_rows(const Runtime& runtime, Executor::Lease& lease, ProductTypes types,
                         const ProductInput& input) {
  if (!is_quantised(types.weight)) return input.x;
  const int32_t** orders = nullptr;
  if (const int32_t* order = input_order(input.w); order != nullptr) {
    orders = lease.scratch().take<const int32_t*>(input.rows);
    std::fill(orders, orders + input.rows, order);
  }
  return quantise_rows(runtime, lease, types, {input.rows, input.k, input.x, nullptr, orders});
}

}  // namespace cadenza
