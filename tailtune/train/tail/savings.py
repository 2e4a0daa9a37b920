"""The four optimisations that are always on in training; only benchmarks and tests switch one off."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Savings:
    """Which computations to avoid. The fifth optimisation, the cache, is the recipe's `tail.cache`."""

    stop_backward: bool = True
    """End the backward pass at the first trainable layer. Needed for a cache: its hidden states have no gradient."""
    packing: bool = True
    """Leave padding out of matrix products."""
    answer_head: bool = True
    """Run the head only where there is a label."""
    shared_prefix: bool = True
    """Compute the tokens that most rows begin with once."""


ALL_SAVINGS = Savings()
