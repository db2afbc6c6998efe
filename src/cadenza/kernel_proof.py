"""`KernelProof`: what an engine compared of its kernels' bits when it loaded a model. A plain
value, which the engine's process sends to the front end."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenProduct:
    """Which kernels compute the products with weights of one shape."""

    weight: str  # its shape and type, such as `28672x4096 bfloat16, gate and up`
    own_rows: tuple[int, ...]  # numbers of rows that the package's kernels compute
    # Those that cublasLt computes, whose bits are the same and which was faster.
    library_rows: tuple[int, ...]
    # Those for which cublasLt has other bits, so that it is not used.
    differing_rows: tuple[int, ...]
    algorithm: str  # cublasLt's for the most rows, or why there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProof:
    """Of kernels whose bits were compared on the device at hand when a model was loaded.

    Each operation was computed for the same tokens in steps of every size, and in steps of
    single tokens, and gave equal bits: otherwise loading fails."""

    operations: tuple[str, ...]  # what was compared, such as `gated_linear 28672x4096 bfloat16`
    step_sizes: tuple[int, ...]  # tokens of the steps
    # How many steps of single tokens of several rows there were; 0 where the model's layers
    # have states, which such steps would need.
    num_single: int
    elapsed_s: float
    # Of each shape of weights, on a device whose library may compute products.
    products: tuple[ProvenProduct, ...] = ()

    @property
    def summary(self) -> str:
        singles = f" and in {self.num_single} of single tokens" if self.num_single else ""
        return (
            f"{len(self.operations)} operations have equal bits in steps of {self.step_sizes[0]} "
            f"to {self.step_sizes[-1]} tokens{singles}, compared in {self.elapsed_s:.1f} s"
        )
