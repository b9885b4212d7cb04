"""Stage 6, lease: how many messages one claim takes, and what follows when a claim fails or is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.errors import ConfigurationError, StoreError, StoreUnavailableError
from onefold.store import Lease, Store
from onefold.store.gates import Gating
from onefold.worker.settings import WorkerSettings

logger = logging.getLogger("onefold")

#: The pause after a claim that the store could not answer; after unexpected errors it doubles up to the second figure.
_BACK_OFF_SECONDS, _BACK_OFF_SECONDS_MAX = 0.5, 10.0
#: Claims in a row that may fail with the same unexpected error before the worker stops.  They take about a minute, in
#: which a shortage of descriptors or memory may pass; a longer failure is a defect, and the supervisor and the operator
#: must see it.
_FAILURES_MAX = 10


class Claimer:
    """Claims for one worker; calls ``accept`` with the leases of each claim and the time at which the claim began."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        types: Sequence[str],
        gatings: Mapping[str, Gating],
        settings: WorkerSettings,
        accept: Callable[[list[Lease], int], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._types = types
        self._gatings = gatings
        self._settings = settings
        self._accept = accept
        self._turn = 0
        self._rate = 0.0
        self._asked_at = clock.steady()
        #: Messages begun since the last claim; counted by the worker.
        self.started = 0
        #: The unexpected error of the last claim, and how many claims in a row have failed with it.
        self._failed: Exception | None = None
        self._failures = 0

    @property
    def ahead(self) -> int:
        """How many messages will start within a moment, at the measured rate."""
        return int(self._rate * limits.CLAIM_AHEAD_SECONDS)

    async def claim(self, wanted: int, at_once: int, in_hand: Callable[[str], int]) -> int | None:
        """Return how many messages were claimed, or None when the claim failed and is worth another try.

        ``at_once`` is how many of them can begin at once; ``in_hand`` returns how many of a queue the worker holds.
        Raises ``StoreError`` when ``_FAILURES_MAX`` claims in a row have failed with the same unexpected error.
        """
        asked_at = self._clock.steady()
        elapsed = max(asked_at - self._asked_at, 1) / MICROSECONDS
        self._rate = 0.5 * self._rate + 0.5 * self.started / elapsed
        self.started, self._asked_at = 0, asked_at
        for queues, most in self._portions(wanted, in_hand):
            leases = await self._try_to_claim(queues, most, self._types, at_once)
            if leases is None:
                await self._back_off()
                return None
            self._accept(leases, asked_at)
            if leases:
                return len(leases)
        return 0

    async def claim_alike(self, message_type: str, wanted: int) -> None:
        """Claim more messages of one type for a batch; a claim that fails leaves the batch as it is."""
        asked_at = self._clock.steady()
        leases = await self._try_to_claim(self._queues(), wanted, [message_type], wanted)
        if leases is not None:
            self._accept(leases, asked_at)

    async def _try_to_claim(
        self, queues: Sequence[str], wanted: int, types: Sequence[str], at_once: int
    ) -> list[Lease] | None:
        """Claim; log an error and return None, unless it is one of the store's for which a retry is of no use."""
        try:
            leases = await self._claim_whole(queues, wanted, types, at_once)
        except StoreUnavailableError as error:
            self._failed = None
            logger.warning("store_unavailable doing=claim error=%s", error)
            return None
        except (StoreError, ConfigurationError):
            raise  # also a database that is damaged or of a newer version
        except Exception as error:
            if type(error) is type(self._failed):
                logger.warning("claim_failed error=%s", error)
            else:
                self._failures = 0
                logger.exception("claim_failed error=%s", error)
            self._failed = error
            return None
        self._failed = None
        return leases

    async def _back_off(self) -> None:
        if self._failed is None:
            await self._clock.sleep(_BACK_OFF_SECONDS)
            return
        self._failures += 1
        if self._failures == _FAILURES_MAX:
            logger.error("claims_stopped failures=%d error=%s: the worker ends", self._failures, self._failed)
            name = type(self._failed).__name__
            raise StoreError(
                f"{self._failures} claims in a row failed with {name}, so the worker ends"
            ) from self._failed
        await self._clock.sleep(min(_BACK_OFF_SECONDS * 2 ** (self._failures - 1), _BACK_OFF_SECONDS_MAX))

    async def _claim_whole(self, queues: Sequence[str], wanted: int, types: Sequence[str], at_once: int) -> list[Lease]:
        """Claim; when the worker is stopped meanwhile, still wait for the answer, because its leases would be lost."""
        asked_at = self._clock.steady()
        claiming = asyncio.ensure_future(
            self._store.claim(
                queues,
                types=types,
                limit=wanted,
                lease=self._settings.lease_seconds,
                worker=self._settings.name,
                lane=self._settings.lane,
                gatings=self._gatings,
                at_once=at_once,
                thorough=self._settings.until_idle,
            )
        )
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            await asyncio.wait([claiming], timeout=limits.STOP_STORE_SECONDS)
            if not claiming.done():
                claiming.cancel()
                logger.warning("claim_given_up: the store did not answer in time; its leases will run out")
            elif not claiming.cancelled() and claiming.exception() is None:
                self._accept(claiming.result(), asked_at)
            raise

    def _portions(self, wanted: int, in_hand: Callable[[str], int]) -> Iterator[tuple[list[str], int]]:
        """Return the queues of each claim and its limit: one claim for all queues without places of their own."""
        queues, places = self._queues(), self._settings.places
        if not places:
            yield queues, wanted
            return
        shared = [queue for queue in queues if queue not in places]
        for queue in queues:
            if queue in places:
                free = min(wanted, places[queue] - in_hand(queue))
                if free > 0:
                    yield [queue], free
            elif queue == shared[0]:
                yield shared, wanted

    def _queues(self) -> list[str]:
        """Return the queues, each call beginning with the next one, so that a busy queue cannot starve the others."""
        queues = self._settings.queues
        turn, self._turn = self._turn, (self._turn + 1) % len(queues)
        return [*queues[turn:], *queues[:turn]]
