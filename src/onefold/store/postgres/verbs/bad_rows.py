"""Rows that a claim fails on: found among all that are due, and set aside as dead letters.

A statement that claims many messages fails for all of them when it fails for one.  So the messages are tried in ever
smaller groups, each in a transaction that is rolled back, until those are left that fail alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import errors

from onefold.clock import MICROSECONDS
from onefold.store import Dead, damaged
from onefold.store.postgres.session import LINE_RETENTION
from onefold.store.postgres.verbs.claim import Claims, Wanted
from onefold.store.postgres.wire.arrays import bigints, ids
from onefold.store.postgres.wire.errors import is_about_rows
from onefold.store.shared.rows import encode_failure

logger = logging.getLogger("onefold")

#: Messages that are tried together at first, and how many such groups one call looks at.
_TOGETHER, _GROUPS_MAX = 1_000, 16
#: Rows set aside by one call: each costs some twenty statements to find.
_SET_ASIDE_MAX = 100

#: A message by its id and fence.
_Candidate = tuple[str, int]


async def set_bad_rows_aside(leasing: Claims, wanted: Wanted) -> int:
    """Make dead letters of the due messages that cannot be claimed; return how many they were."""
    return await _Search(leasing, wanted).run()


class _Search:
    def __init__(self, leasing: Claims, wanted: Wanted) -> None:
        self._wire = leasing.wire
        self._asked = leasing.asking(wanted)
        self._found = 0

    async def run(self) -> int:
        after: _Candidate = ("00000000-0000-0000-0000-000000000000", 0)
        for _ in range(_GROUPS_MAX):
            given = {**self._asked, "after": after[0], "after_due": after[1], "portion": _TOGETHER}
            rows = await self._wire.rows("claim_candidates", given)
            await self._try([(id_, fence) for id_, fence, _ in rows])
            if len(rows) < _TOGETHER or self._found >= _SET_ASIDE_MAX:
                break
            after = (rows[-1][0], rows[-1][2])
        return self._found

    async def _try(self, candidates: Sequence[_Candidate]) -> None:
        """Set aside those of the candidates that cannot be claimed."""
        if not candidates or self._found >= _SET_ASIDE_MAX:
            return
        error = await self._error_of(candidates)
        if error is None:
            return
        if len(candidates) > 1:
            half = len(candidates) // 2
            await self._try(candidates[:half])
            await self._try(candidates[half:])
        elif not isinstance(error, errors.UniqueViolation):
            # That one says only that another of its line was let through meanwhile.
            await self._set_aside(candidates[0], error)

    async def _error_of(self, candidates: Sequence[_Candidate]) -> psycopg.Error | None:
        """Claim and roll back; return what is wrong with one of these rows, if anything is."""
        given: dict[str, Any] = {
            "ids": ids([id_ for id_, _ in candidates]),
            "fences": bigints([fence for _, fence in candidates]),
        }
        try:
            async with self._wire.transaction():
                await self._wire.rows("claim_lines", {**self._asked, **given})
                raise _TriedError
        except _TriedError:
            return None
        except psycopg.Error as error:
            if not is_about_rows(error):
                raise
            return error

    async def _set_aside(self, candidate: _Candidate, error: psycopg.Error) -> None:
        dead = Dead(damaged(f"it cannot be claimed: PostgreSQL: {str(error).strip()}"))
        given = {
            "now": self._asked["now"],
            "id": candidate[0],
            "fence": candidate[1],
            "failure": encode_failure(dead.failure),
            "key_window": round(dead.key_window * MICROSECONDS),
            "body_window": round(dead.body_retention * MICROSECONDS),
            "line_retention": LINE_RETENTION,
        }
        if await self._wire.rows("claim_set_aside", given):
            self._found += 1
            logger.error("set_aside message_id=%s reason=damaged", candidate[0])


class _TriedError(Exception):
    """Ends a transaction in which nothing was to be done."""
