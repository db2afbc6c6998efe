"""The bounds, against numbers worked out by hand for the shape of SmolLM2-135M."""

import pytest

from cadenza.bench.machine import Cost, ModelCost, Prompts, Roofline
from cadenza.checkpoint.random_checkpoint import named_shape

LAYER_PARAMETERS = 30 * (576 * (9 + 3 + 3) * 64 + 9 * 64 * 576 + 3 * 576 * 1536)
HEAD_PARAMETERS = 49152 * 576
KV_BYTES = 2 * 30 * 3 * 64 * 2
PAIR_OPERATIONS = 4 * 9 * 64 * 30
MACHINE = Roofline(read_gb_s=45.0, gflop_s=970.0, dtype="bfloat16", method="native")


@pytest.fixture
def cost() -> ModelCost:
    return ModelCost.of(named_shape("smollm2-135m"), "bfloat16")


def test_a_model_cost_counts_the_matrix_products_once(cost: ModelCost):
    assert cost.layer_parameters == LAYER_PARAMETERS == 106_168_320
    assert cost.head_parameters == HEAD_PARAMETERS == 28_311_552
    assert cost.weight_bytes(1) == 2 * (LAYER_PARAMETERS + HEAD_PARAMETERS) == 268_959_744
    assert cost.kv_bytes_per_token == KV_BYTES == 23_040


def test_an_untied_head_is_counted_as_head_and_not_as_a_layer():
    cost = ModelCost.of(named_shape("tiny-llama"), "float32")
    assert cost.head_parameters == 331 * 72
    assert cost.layer_parameters == 3 * (72 * (6 + 2 + 2) * 64 + 6 * 64 * 72 + 3 * 72 * 168)
    assert cost.weight_bytes(1) == 4 * (cost.head_parameters + cost.layer_parameters)


def test_a_step_reads_quantised_weights_in_their_own_bytes(cost: ModelCost):
    quantised = ModelCost.of(named_shape("smollm2-135m"), "bfloat16", "int8")
    assert quantised.weight_bytes(1) == (LAYER_PARAMETERS + HEAD_PARAMETERS) * 34 // 32
    assert quantised.kv_bytes_per_token == cost.kv_bytes_per_token
    assert quantised.decode_step(8, 1.0).operations == cost.decode_step(8, 1.0).operations


def test_a_step_reads_kv_in_int8_in_its_own_bytes(cost: ModelCost):
    coded = ModelCost.of(named_shape("smollm2-135m"), "bfloat16", kv_cache_dtype="int8")
    assert coded.weight_bytes(1) == cost.weight_bytes(1)
    assert coded.kv_bytes_per_token == KV_BYTES * 68 // 128


def test_a_step_reads_the_recurrent_state_of_each_row():
    conv = ModelCost.of(named_shape("tiny-lfm2"), "bfloat16")
    assert conv.state_bytes == 3 * 2 * 96 * 2  # three layers, two inputs of 96 channels
    scan = ModelCost.of(named_shape("tiny-granite4"), "bfloat16")
    assert scan.state_bytes == 3 * (3 * 384 * 2 + 6 * 48 * 32 * 4)
    assert scan.decode_step(8, 0.0).read_bytes == scan.weight_bytes(8) + 8 * scan.state_bytes


def test_routers_are_not_quantised(mixture: ModelCost):
    quantised = ModelCost.of(named_shape("tiny-qwen3-moe"), "bfloat16", "int8")
    routers = 3 * 96 * 13
    complete = 3 * 4 * 2 * 40 * 96 + 3 * 4 * 96 * 64  # down's 40 columns are two groups of 32
    rest = PLAIN - routers - 3 * 96 * 168 + 96 * 192 + 2 * 96 * 168  # and 168 are six groups
    expected = 2 * routers + (rest + complete + 331 * 96) * 34 // 32
    assert quantised.decode_step(1, 0.0).read_bytes == expected


# Parameters of one expert of `tiny-qwen3-moe`, whose token chooses 4 of 13 in 3 of 4 layers.
EXPERT = 3 * 96 * 40

PLAIN = 4 * (96 * (6 + 2 + 2) * 32 + 6 * 32 * 96) + 3 * 96 * 13 + 3 * 96 * 168


@pytest.fixture
def mixture() -> ModelCost:
    return ModelCost.of(named_shape("tiny-qwen3-moe"), "bfloat16")


@pytest.mark.parametrize(
    ("rows", "num_experts"), [(1, 4.0), (3, 13 * (1 - (9 / 13) ** 3)), (400, 13.0)]
)
def test_a_step_reads_the_distinct_experts_that_tokens_touch_on_average(
    mixture: ModelCost, rows: int, num_experts: float
):
    assert mixture.layer_parameters == PLAIN
    assert mixture.decode_step(rows, 0.0).read_bytes == pytest.approx(
        2 * (PLAIN + 3 * num_experts * EXPERT + 331 * 96)
    )


def test_a_step_reads_the_experts_that_were_counted(mixture: ModelCost):
    found = mixture.decode_step(3, 0.0, touched_bytes=1000.0)
    assert found.read_bytes == 2 * (PLAIN + 331 * 96) + 1000
    assert found.operations == mixture.decode_step(3, 0.0).operations


def test_a_gated_mlp_for_all_tokens_is_not_counted_with_the_experts_a_second_time():
    cost = ModelCost.of(named_shape("tiny-qwen3.5-moe"), "bfloat16")
    assert cost.gated_bytes > 0
    counted = cost.gated_bytes + 1000.0
    found = cost.decode_step(1, 0.0, touched_bytes=counted).read_bytes
    assert found == cost.layer_bytes + cost.head_bytes + cost.state_bytes + 1000


def test_a_token_is_multiplied_with_its_own_experts_only(mixture: ModelCost):
    assert mixture.decode_step(8, 0.0).operations == 16 * (PLAIN + 3 * 4 * EXPERT + 331 * 96)
    work = mixture.prefill(Prompts(count=1, length=10, token_budget=64))
    pairs = 55 * 4 * 6 * 32 * 4
    assert work.operations == 20 * (PLAIN + 3 * 4 * EXPERT) + 2 * 331 * 96 + pairs


def test_the_last_step_of_prompts_reads_the_experts_of_its_own_tokens(mixture: ModelCost):
    prompts = Prompts(count=2, length=33, token_budget=64)
    assert prompts.step_sizes == [64, 2]
    in_last = 13 * (1 - (9 / 13) ** 2)
    weights = 2 * (PLAIN + 331 * 96) + 3 * (13 + in_last) * EXPERT
    kv_bytes = 66 * 2 * 4 * 2 * 32 * 2
    assert mixture.prefill(prompts).read_bytes == pytest.approx(2 * weights + kv_bytes)


def test_a_decode_step_reads_weights_and_contexts(cost: ModelCost):
    work = cost.decode_step(8, 160.0)
    assert work.read_bytes == 268_959_744 + 8 * 160 * KV_BYTES
    assert work.operations == 8 * (2 * 134_479_872 + 160 * PAIR_OPERATIONS)


@pytest.mark.parametrize(
    ("rows", "tokens_per_s", "limit"), [(1, 167, "read"), (8, 1338, "read"), (32, 3606, "multiply")]
)
def test_the_decode_bound_without_context_is_that_of_the_specification(
    cost: ModelCost, rows: int, tokens_per_s: int, limit: str
):
    work = cost.decode_step(rows, 0.0)
    assert round(rows / work.bound_s(MACHINE)) == tokens_per_s
    assert work.limit(MACHINE) == limit


def test_the_prefill_bound_counts_the_head_once_for_each_prompt(cost: ModelCost):
    work = cost.prefill(Prompts(count=4, length=128, token_budget=512))
    assert work.operations == (
        2 * LAYER_PARAMETERS * 512
        + 2 * HEAD_PARAMETERS * 4
        + 4 * (128 * 129 // 2) * PAIR_OPERATIONS
    )
    assert work.read_bytes == 268_959_744 + 512 * KV_BYTES


def test_prefill_reads_the_weights_once_for_each_step_of_its_budget(cost: ModelCost):
    prompts = Prompts(count=3, length=500, token_budget=512)
    assert (prompts.num_tokens, len(prompts.step_sizes)) == (1500, 3)
    assert cost.prefill(prompts).read_bytes == 3 * 268_959_744 + 1500 * KV_BYTES


def test_the_bound_is_the_longer_of_reading_and_multiplying():
    machine = Roofline(read_gb_s=2.0, gflop_s=10.0, dtype="float32", method="native")
    assert Cost(read_bytes=4e9, operations=1e9).bound_s(machine) == 2.0
    assert Cost(read_bytes=1e9, operations=30e9).bound_s(machine) == 3.0


def test_each_rate_of_several_measurements_is_a_median_of_its_own():
    rates = [(2.0, 10.0), (1.0, 11.0), (9.0, 50.0)]
    found = [
        Roofline(read_gb_s=read, gflop_s=multiply, dtype="float32", method="native")
        for read, multiply in rates
    ]
    middle = Roofline.median_of(found)
    assert (middle.read_gb_s, middle.gflop_s) == (2.0, 11.0)
    assert Roofline.median_of(found[:2]).read_gb_s == 1.5
