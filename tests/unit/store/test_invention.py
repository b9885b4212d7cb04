"""A contributor who adds an envelope field or a state is told of each place that forgets it.

Both are invented in a process of its own, which changes the source as the contributor would, and are followed through
both stores: see ``invention/``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "invention"

#: Places that could forget a field: a module, a text of it, and the text without the invented field.
ENVELOPE = "onefold.message.envelope"
FORGETFUL = {
    "headers": (
        ENVELOPE,
        "HEADERS = tuple(name for name in _FIELDS if name not in COLUMNS + OTHER_TABLES)",
        "HEADERS = tuple(name for name in _FIELDS if name not in (*COLUMNS, *OTHER_TABLES, 'invented'))",
    ),
    "wire": (
        ENVELOPE,
        "_SHARED = tuple(name for name in _FIELDS if",
        "_SHARED = tuple(name for name in _FIELDS if name != 'invented' and",
    ),
    "store only": (ENVELOPE, "STORE_ONLY = (*OTHER_TABLES,", 'STORE_ONLY = (*OTHER_TABLES, "invented",'),
    "receive": ("onefold.brokers.admission", "**carried(sent),", "**{**carried(sent), 'invented': ''},"),
    "copy": ("onefold.events.subscriptions", "**carried(event),", "**{**carried(event), 'invented': ''},"),
    "read": (
        "onefold.store.shared.rows",
        "**unpack_headers(packed))",
        "**{**unpack_headers(packed), 'invented': ''})",
    ),
}


def lost(kind: str, url: str, *change: str) -> str:
    """Return where the invention was lost, a place on a line."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), kind, url, *change], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_invented_field_arrives_by_every_way(store_url: str) -> None:
    """A2: put one by one, in bulk and in a batch, claimed, found, copied to subscribers, relayed and received."""
    assert lost("field", store_url) == ""


@pytest.mark.parametrize("place", FORGETFUL)
def test_a_place_that_forgets_an_invented_field_is_found(place: str, sqlite_url: str) -> None:
    """A2: the test above is no comfort unless it fails for each place."""
    assert lost("field", f"{sqlite_url}?synchronous=OFF", *FORGETFUL[place])


#: Changes that let an invented state pass where it is refused first, so that the place behind is asked too.
MOVE = (
    "onefold.store.states",
    "    (State.DEAD, State.DISCARDED): ",
    '    (State.DEAD, State.INVENTED): "operator",\n    (State.DEAD, State.DISCARDED): ',
)
CONSTRAINT = (
    "onefold.store.shared.sql",
    "fill_in(file.read_text(), NAMES)",
    "fill_in(file.read_text().replace('AND {discarded})', 'AND 7)').replace('ELSE false', 'ELSE true'), NAMES)",
)


def test_each_state_is_known_everywhere_and_an_invented_one_nowhere(store_url: str) -> None:
    """M5: the legal moves, a table's constraint, the view, find and count know each state, and are asked for each."""
    assert lost("state", store_url).splitlines() == [
        "invented: no move in MOVES leads to it",
        "invented: no table takes it",
    ]


@pytest.mark.empty
def test_a_view_that_has_no_name_for_a_state_is_found(store_url: str) -> None:
    """M5: behind a move and a constraint that know it."""
    assert lost("state", store_url, *MOVE, *CONSTRAINT) == "invented: the view inbox has no name for it\n"
