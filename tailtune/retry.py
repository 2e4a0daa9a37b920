"""Try a call again while its failure may be temporary: the one retry loop of fetching, Kubernetes and the server."""

import math
from collections.abc import Callable
from typing import TypeVar

import tenacity

TEMPORARY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed."""
Result = TypeVar("Result")


def retry(
    function: Callable[[], Result],
    *,
    is_temporary: Callable[[BaseException], bool],
    seconds: float = math.inf,
    attempts: int | None = None,
    first_wait_seconds: float = 0.5,
    longest_wait_seconds: float = 30.0,
    on_retry: Callable[[BaseException, int, float], None] = lambda error, attempt, wait_seconds: None,
) -> Result:
    """Return `function()`, called again while `is_temporary(error)`, for `seconds` and at most `attempts` times.

    The wait doubles from `first_wait_seconds`, with jitter. `on_retry(error, attempt, wait_seconds)` runs before each
    wait. The last error is raised as it is.
    """

    def before_sleep(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None and state.next_action is not None
        error = state.outcome.exception()
        assert error is not None
        on_retry(error, state.attempt_number, state.next_action.sleep)

    stop: tenacity.stop.stop_base = tenacity.stop_after_delay(seconds)
    if attempts is not None:
        stop = tenacity.stop_after_attempt(attempts) | tenacity.stop_before_delay(seconds)
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_temporary),
        wait=tenacity.wait_random_exponential(multiplier=first_wait_seconds, max=longest_wait_seconds),
        stop=stop,
        before_sleep=before_sleep,
        reraise=True,
    )(function)
