"""The packed sequence and its groups."""

from typing import Any

import numpy as np
import torch

from tailtune.train.tail.layout import Group, Layout, lay_out

CPU = torch.device("cpu")


def values(group: Group) -> dict[str, Any]:
    """The fields of a group as lists."""
    columns = None if group.columns is None else group.columns.tolist()
    return {"prefix_length": group.prefix_length, "keys": group.keys.tolist(), "queries": group.queries.tolist(),
            "columns": columns, "slots": group.slots.tolist()}  # fmt: skip


def groups_in_order(layout: Layout) -> list[dict[str, Any]]:
    """The groups of a layout whose outputs need no reordering."""
    groups, order = layout.grouped
    assert order is None
    return [values(group) for group in groups]


PREFIX_GROUP = {"prefix_length": 0, "keys": [[0, 1, 2]], "queries": [[0, 1, 2]], "columns": None, "slots": [0, 1, 2]}


def test_the_worked_example() -> None:
    """The numbers in the docstring of the module."""
    layout = lay_out(3, np.array([3, 3]), np.array([2, 4]), CPU)
    assert layout.offsets.tolist() == [3, 5]
    assert [indices.tolist() for indices in layout.token_indices] == [[3, 4], [5, 6, 7, 8]]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    keys = [[3, 4, 4, 4], [5, 6, 7, 8]]
    rows = {"prefix_length": 3, "keys": keys, "queries": keys, "columns": None, "slots": [0, 1, 4, 5, 6, 7]}
    assert groups_in_order(layout) == [PREFIX_GROUP, rows]


def test_the_worked_example_with_fewer_queries() -> None:
    layout = lay_out(3, np.array([3, 3]), np.array([2, 4]), CPU).select_queries(np.array([4, 8]))
    keys = [[3, 4, 4, 4], [5, 6, 7, 8]]
    rows = {"prefix_length": 3, "keys": keys, "queries": [[0], [1]], "columns": [[1], [3]], "slots": [0, 1]}
    assert groups_in_order(layout) == [rows]


def test_the_worked_example_with_inherited_tokens() -> None:
    layout = lay_out(3, np.array([3, 3]), np.array([2, 4]), CPU, num_inherited=np.array([0, 1]))
    assert layout.offsets.tolist() == [3, 5]
    assert [indices.tolist() for indices in layout.token_indices] == [[3, 4], [3, 5, 6, 7]]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 4, 5, 6]
    assert groups_in_order(layout) == [
        PREFIX_GROUP,
        {"prefix_length": 3, "keys": [[3, 4]], "queries": [[3, 4]], "columns": None, "slots": [0, 1]},
        {"prefix_length": 3, "keys": [[3, 5, 6, 7]], "queries": [[5, 6, 7]], "columns": [[1, 2, 3]],
         "slots": [0, 1, 2]},
    ]  # fmt: skip


def test_positions_count_from_the_start_of_the_whole_row() -> None:
    layout = lay_out(3, np.array([3, 0, 3]), np.array([2, 4, 1]), CPU)
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 3]
    assert layout.offsets.tolist() == [3, 5, 9]
