"""What the states of a hybrid take, beside the keys and values of a dense model of its size."""

from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.models.declaration import count_parameters

NUM_ROWS, NUM_TOKENS, SLOTS_PER_ROW = 32, 4000, 2


def test_rows_of_a_hybrid_take_less_than_those_of_a_dense_model_of_its_size():
    hybrid, dense = named_shape("qwen3.5-0.8b"), named_shape("qwen3-0.6b")
    assert count_parameters(hybrid) > count_parameters(dense)
    states = NUM_ROWS * SLOTS_PER_ROW * hybrid.state_bytes("bfloat16")
    kv = NUM_ROWS * NUM_TOKENS * hybrid.kv_bytes_per_token("bfloat16")
    assert states + kv < NUM_ROWS * NUM_TOKENS * dense.kv_bytes_per_token("bfloat16") / 4


def test_a_state_has_the_inputs_of_the_convolution_and_a_matrix_a_head():
    hybrid = named_shape("qwen3.5-0.8b")
    inputs, matrices = 3 * (3 * 16 * 128) * 2, 16 * 128 * 128 * 4
    assert hybrid.state_bytes("bfloat16") == 18 * (inputs + matrices)
