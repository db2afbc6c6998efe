"""/health tells which kernels were proved when the model was loaded."""

from dataclasses import replace

from cadenza.engine.batch_engine import EngineStatus
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.kernel_proof import KernelProof
from tests.server.harness import running_server
from tests.server.scripted_engine import ScriptedEngine

PROOF = KernelProof(
    operations=("linear 6144x4096 bfloat16",), step_sizes=(1, 2, 4), num_single=2, elapsed_s=0.5
)


class ProvenEngine(ScriptedEngine):
    def status(self) -> EngineStatus:
        return replace(super().status(), kernel_proof=PROOF)


def test_health_has_the_proof_of_the_kernels(script: tuple[int, ...], text: TextFrontend) -> None:
    with running_server(ProvenEngine(script), text) as server:
        assert server.get("/health").json() == {
            "status": "ready",
            "kernel_proof": {
                "operations": ["linear 6144x4096 bfloat16"],
                "step_sizes": [1, 2, 4],
                "num_single": 2,
                "elapsed_s": 0.5,
                "products": [],
            },
        }
        assert server.get("/ready").json() == {"status": "ready"}


def test_health_has_no_proof_where_none_is_needed(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    with running_server(ScriptedEngine(script), text) as server:
        assert server.get("/health").json() == {"status": "ready"}
