"""Whatever stands in a recipe file or a parameter: it is a recipe that survives its own JSON, or one UserError."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailtune.errors import UserError
from tailtune.recipe.load import BUILT_IN, PARAMETERS, load_recipe, parse_parameters, parse_recipe, with_overrides
from tailtune.recipe.schema import Recipe

SURVIVAL = load_recipe("survival")
TEXT = (BUILT_IN / "survival.yaml").read_text(encoding="utf-8")
PIECES = st.sampled_from([
    "{", "}", "{{", "[", "]", "&a", "*a", "<<:", "!!int ", ": ", "- ", "? ", "\n", "\n  ", "'", '"', "#", "|", ">", "~",
    ".inf", "1e999", "9" * 400, "0x1f", "12:30", "2024-13-01", "\0", "\ud800", "\u202e", "\x85", "\ufeff", "\\ud800",
    "hf://datasets/a/b", "https://u:p@[::1/a?x=1", "~nobody/x", "small", "embedded", "${DATA_X}", "{{$}}", "$(X)",
    "seed", "local", "stages", "0", "trainer", "<all>", "data", "source", "resources", "environment",
])  # fmt: skip
TEXTS = st.text(max_size=8) | PIECES | st.lists(PIECES, max_size=12).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def keys_of(value: Any, prefix: str = "") -> list[str]:
    """The dotted keys of all sections and values."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(f"{prefix}{name}", each) for name, each in items]
    return [key for name, each in found for key in (name, *keys_of(each, f"{name}."))]


KEYS = st.sampled_from([*PARAMETERS, *keys_of(SURVIVAL.model_dump(mode="json"))])
QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def survives(make: Callable[[], Recipe]) -> None:
    recipe, message = None, ""
    try:
        recipe = make()
    except UserError as error:
        message = str(error)
    assert recipe or message
    assert "\n" not in message and len(message) < 4_200
    assert recipe is None or parse_recipe(recipe.to_json()) == recipe


@QUICK
@given(at=st.integers(0, len(TEXT)), cut=st.integers(0, 40), piece=TEXTS, suffix=st.sampled_from([".yaml", ".json"]))
def test_any_text_in_a_recipe_file(at: int, cut: int, piece: str, suffix: str, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    text = TEXT if suffix == ".yaml" else json.dumps(SURVIVAL.model_dump(mode="json"))
    path.write_bytes((text[:at] + piece + text[at + cut :]).encode("utf-8", "surrogatepass"))
    survives(lambda: load_recipe(path))


@QUICK
@given(key=KEYS, value=VALUES)
def test_any_value_at_any_key(key: str, value: Any) -> None:
    survives(lambda: with_overrides(SURVIVAL, {key: value}))


@QUICK
@given(key=KEYS, tail=st.just("") | TEXTS, value=TEXTS)
def test_any_parameter(key: str, tail: str, value: str) -> None:
    survives(lambda: with_overrides(SURVIVAL, parse_parameters([f"{key}{'.' if tail else ''}{tail}={value}"])))


@QUICK
@given(raw=VALUES, key=KEYS)
def test_any_object_in_the_dashboard(raw: Any, key: str) -> None:
    survives(lambda: parse_recipe(json.dumps(raw)))
    document = {**SURVIVAL.model_dump(mode="json"), key.partition(".")[0]: raw}
    survives(lambda: parse_recipe(json.dumps(document)))
