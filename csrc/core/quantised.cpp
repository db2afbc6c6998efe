#include "core/quantised.h"

namespace cadenza {

ProductKernels product_kernels(const Runtime& runtime, ProductTypes types) {
  const int weight = index_of(types.weight), act = index_of(types.activation);
  if (types.weight == WeightFormat::kFloat8) {
    const Float8Kernels& table = runtime.kernels.float8;
    return {table.max_rows,    table.linear[act],        table.gated[act],
            table.logits[act], table.grouped_gated[act], table.grouped_linear[act]};
  }
  if (!is_quantised(types.weight)) {
    const KernelTable& table = runtime.kernels;
    return {table.max_rows,       table.linear[weight],        table.gated[weight],
            table.logits[weight], table.grouped_gated[weight], table.grouped_linear[weight]};
  }
  const IntegerKernels& table = runtime.integer;
  return {table.max_rows,   table.linear[act],        table.gated[act],
          table.logits,     table.grouped_gated[act], table.grouped_linear[act]};
}

int64_t product_row_bytes(ProductTypes types, int64_t k) {
  if (is_quantised(types.weight)) return code_row_bytes(k);
  return k * (types.activation == DType::kF32 ? 4 : 2);
}

const void* product_rows(const Runtime& runtime, Executor::Lease& lease, ProductTypes types,
                         const QuantiseTask& rows) {
  if (!is_quantised(types.weight)) return rows.x;
  QuantiseTask task = rows;
  task.out = lease.scratch().take<uint8_t>(rows.rows * code_row_bytes(rows.k));
  lease.run({runtime.integer.quantise[index_of(types.activation)], &task, rows.rows, 16},
            rows.rows * rows.k > kMinParallelElements);
  return task.out;
}

}  // namespace cadenza
