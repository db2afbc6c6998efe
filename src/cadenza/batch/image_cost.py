"""`ImageCost`: how long work items of encoding take, predicted from their operations. Owns the
prediction and its correction by measured steps; `image_queue` spends the time. Invariant: rates are
positive, and a step says most about what it consists of."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CORRECTION = 0.1
FIRST_CORRECTION, NUM_FIRST = 1.0, 16  # For so many steps rates follow what is measured faster

# A measured time counts as at most this multiple of its prediction, and at least its inverse.
MAX_RATIO = 2.0

SMALLEST_MS = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageWork:
    """What each of an image's work items computes, in order: [Q] operations of matrix products and
    of attention."""

    products: npt.NDArray[np.float64]
    attention: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.products)

    def load(self, start: int, stop: int) -> "ImageLoad":
        return ImageLoad(
            num_quanta=stop - start,
            products=float(self.products[start:stop].sum()),
            attention=float(self.attention[start:stop].sum()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLoad:
    """Work items, and their operations."""

    num_quanta: int = 0
    products: float = 0.0
    attention: float = 0.0

    def plus(self, other: "ImageLoad") -> "ImageLoad":
        return ImageLoad(
            num_quanta=self.num_quanta + other.num_quanta,
            products=self.products + other.products,
            attention=self.attention + other.attention,
        )


NO_LOAD = ImageLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCost:
    """Milliseconds of each work item and operation. Defaults are a slow machine's: first plans are
    small."""

    quantum_ms: float = 0.01
    product_ms: float = 5e-9
    attention_ms: float = 1e-8
    num_measured: int = 0

    def predict_ms(self, load: ImageLoad) -> float:
        return (
            self.quantum_ms * load.num_quanta
            + self.product_ms * load.products
            + self.attention_ms * load.attention
        )

    def num_within(self, work: ImageWork, start: int, most: int, left_ms: float) -> int:
        """Work items from `start` on, at most `most`, that take `left_ms`; may be 0."""
        stop = min(len(work), start + most)
        each = (
            self.quantum_ms
            + self.product_ms * work.products[start:stop]
            + self.attention_ms * work.attention[start:stop]
        )
        return int(np.searchsorted(np.cumsum(each), left_ms, side="right"))

    def corrected(self, load: ImageLoad, text_ms: float, measured_ms: float) -> "ImageCost":
        """After a step with `load` took `measured_ms`, its tokens `text_ms` of it; each rate
        changes by its own part of the step."""
        predicted = self.predict_ms(load)
        ratio = min(MAX_RATIO, max(1 / MAX_RATIO, (measured_ms - text_ms) / predicted))
        weight = FIRST_CORRECTION if self.num_measured < NUM_FIRST else CORRECTION
        factor = weight * (ratio - 1) / (predicted + text_ms)

        def corrected(ms: float, count: float) -> float:
            return max(SMALLEST_MS, ms * (1 + factor * ms * count))

        return ImageCost(
            quantum_ms=corrected(self.quantum_ms, load.num_quanta),
            product_ms=corrected(self.product_ms, load.products),
            attention_ms=corrected(self.attention_ms, load.attention),
            num_measured=self.num_measured + 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredQuanta:
    """Work items that a step without tokens computed, and the milliseconds that it took."""

    load: ImageLoad
    ms: float


def fit_image_cost(measured: list[MeasuredQuanta]) -> ImageCost:
    """From measured steps: first those without attention; what none had keeps its default."""
    cost = ImageCost()
    plain = [each for each in measured if not each.load.attention and each.load.products]
    plain = plain or [each for each in measured if each.load.products]
    if not plain:
        return cost
    operations = sum(each.load.products for each in plain)
    product_ms = max(SMALLEST_MS, sum(each.ms for each in plain) / operations)
    rest = [each for each in measured if each.load.attention]
    attention_ms = product_ms
    if rest:
        left_ms = sum(each.ms - product_ms * each.load.products for each in rest)
        attention_ms = left_ms / sum(each.load.attention for each in rest)
    return ImageCost(
        quantum_ms=SMALLEST_MS,
        product_ms=product_ms,
        attention_ms=max(SMALLEST_MS, product_ms / 8, attention_ms),
        num_measured=NUM_FIRST,
    )
