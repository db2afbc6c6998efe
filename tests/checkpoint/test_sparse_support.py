"""Which models compute sparse prompts, and which score prompts."""

from dataclasses import replace

from cadenza.models.layer_kind import ConvShape, LatentShape, LayerKind
from cadenza.models.model_config import scoring_layers, scoring_refusal, sparse_refusal
from tests.cli.harness import TINY

FULL, NEAR, FAR = LayerKind(), LayerKind(window=64), LayerKind(window=128)
RECURRENT = LayerKind(recurrence=ConvShape(num_inputs=3, num_channels=64))
LATENT = LayerKind(
    latent=LatentShape(
        num_heads=4, rank=32, query_rank=None, plain_size=16, rotary_size=16, value_size=16
    )
)


def test_layers_with_a_window_score_nothing():
    model = replace(TINY, num_layers=4, layer_pattern=(NEAR, FULL))
    assert scoring_layers(model) == (1, 3)
    assert scoring_refusal(model) is None
    windowed = replace(TINY, layer_pattern=(NEAR,))
    assert scoring_refusal(windowed) == "each of its layers has a window"


def test_recurrent_layers_and_latents_are_refused_by_name():
    for refusal in (sparse_refusal, scoring_refusal):
        found = refusal(replace(TINY, num_layers=2, layer_pattern=(FULL, RECURRENT)))
        assert found is not None
        assert "recurrent state" in found
    latents = replace(TINY, layer_pattern=(LATENT,))
    assert scoring_refusal(latents) == "its keys are latents"
    assert sparse_refusal(latents) is None


def test_windows_of_one_size_alone_are_sparse():
    assert sparse_refusal(replace(TINY, num_layers=2, layer_pattern=(FULL, NEAR))) is None
    found = sparse_refusal(replace(TINY, num_layers=3, layer_pattern=(FULL, NEAR, FAR)))
    assert found == "its layers have windows of 2 sizes, from 64 to 128"
