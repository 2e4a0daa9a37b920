"""Imports without garbage collection."""

import gc

import pytest

from tailtune.imports import uncollected


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_although_an_import_fails(enabled: bool) -> None:
    was_enabled, num_frozen = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ModuleNotFoundError), uncollected():
            assert not gc.isenabled()
            import no_module_of_this_name  # noqa: F401
        assert gc.isenabled() == enabled and gc.get_freeze_count() > num_frozen
    finally:
        (gc.enable if was_enabled else gc.disable)()
