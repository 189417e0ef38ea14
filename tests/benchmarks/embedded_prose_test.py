"""Questions about documentation: right answers by hand, markup gone, what is no prose left out."""

from __future__ import annotations

import pytest

from draftsmith.benchmarks.embedded.prose import Documented, plain, turns_of

DOCSTRING = """Find the shortest route between two stations of the network.

The route is found by Dijkstra's algorithm with a binary heap.  Stations that are closed are left out, and ``None`` is
returned where no open route is left [1]_.

Trains that run late do not count here. Their delays are known only after :meth:`~Network.update` was called, which asks
the operator.

Parameters
----------
start : str
    Name of the station where the journey begins. It must be open on the day of the journey.
limit : int
    Hours.

Returns
-------
list of str
    Names of the stations in the order of travel, the first and the last of them included.

Examples
--------
>>> route("Bern", "Chur")
"""
ITEM = Documented("rail.route", "route(start, limit)", DOCSTRING, "rail")


def test_every_task_has_its_answer():
    made = {(task, prompt): answer for task, prompt, answer in turns_of(ITEM)}
    algorithm = (
        "The route is found by Dijkstra's algorithm with a binary heap. Stations that are closed are left out, and "
        "None is returned where no open route is left."
    )
    first = "Find the shortest route between two stations of the network."
    delays = "Their delays are known only after Network.update was called, which asks the operator."
    assert made == {
        ("describe", "What does route(start, limit) of rail do?"): f"{first} {algorithm}",
        ("details", f"Tell me more about rail.route. {first}"): f"Trains that run late do not count here. {delays}",
        ("parameter", "What is start of rail.route?"): (
            "Name of the station where the journey begins. It must be open on the day of the journey."
        ),
        ("returns", "What does rail.route return?"): (
            "Names of the stations in the order of travel, the first and the last of them included."
        ),
        ("continue", f"Go on: {algorithm.split('. ')[0]}."): f"{algorithm.split('. ')[1]}",
        ("continue", "Go on: Trains that run late do not count here."): delays,
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("See :class:`~torch.Tensor` and\n  ``dim`` [12]_.", "See torch.Tensor and dim."),
        ("Of **every** `row <https://x.org>`_, *not* a*b*c.", "Of every row, not a*b*c."),
        ("A [link](https://x.org/a) in `code`.", "A link in code."),
    ],
)
def test_markup_is_dropped(text, shown):
    assert plain(text) == shown
