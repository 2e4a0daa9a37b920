"""Import torch and what is built on it a quarter faster, or say that it is not installed."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from packaging.requirements import Requirement

from tailtune.errors import UserError

INSTALL = "pip install -c constraints.txt -e ."
INSTALL_TRAIN = "pip install -c constraints.txt -e '.[train]'"
NUM_NAMED = 3
"""Missing packages that a message names."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Import modules without garbage collection, and leave them out of every later one.

    Modules are never garbage. Yet while thousands of them are imported, and again when the process ends, the collector
    examines all of their objects: a quarter of the CPU time of starting a rank (BENCHMARKS.md, "Imports").
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def requirements(extra: str = "") -> list[Requirement]:
    """Return what every installation of tailtune requires, or what `extra` adds. Raises UserError."""
    try:
        texts = metadata.requires("tailtune") or []
    except metadata.PackageNotFoundError:
        raise UserError("tailtune itself is not installed", INSTALL) from None

    def applies(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    all_of_them = [Requirement(text) for text in texts]
    return [one for one in all_of_them if applies(one, extra) and not (extra and applies(one, ""))]


def installed_version(name: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing_packages(extra: str) -> str:
    """Return which packages of the extra are not installed, in words; empty if none. Raises UserError."""
    names = [requirement.name for requirement in requirements(extra) if installed_version(requirement.name) is None]
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more


def require_train(what: str) -> None:
    """Raise UserError unless the packages that run models are installed. `what` is the command that needs them."""
    if missing := missing_packages("train"):
        raise UserError(f"{what} needs packages that are not installed: {missing}", INSTALL_TRAIN)
