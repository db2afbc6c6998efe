func.func @product(%x: tensor<8x576xf32>, %w: tensor<96x576xf32>) -> tensor<8x96xf32> {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [1], precision = [HIGHEST, HIGHEST]
    : (tensor<8x576xf32>, tensor<96x576xf32>) -> tensor<8x96xf32>
  return %y : tensor<8x96xf32>
}
