"""Reading the replies of a Redis server, with a limit on the memory that one reply takes.

The driver keeps a whole reply in memory, so one command could take more memory than the process has.
Here a value that is too large for an envelope is read to its end, and only its beginning is kept.
"""

from __future__ import annotations

from asyncio import IncompleteReadError
from typing import Any

from redis import exceptions
from redis._parsers import _AsyncRESP2Parser

from onefold import limits

#: The longest value that Redis stores, unless its operator has raised ``proto-max-bulk-len``.
VALUE_BYTES_MAX = 512 * 1_048_576
#: Ids of entries are shorter than this; up to this many are kept even when the limit leaves no room for other values.
_ID_BYTES, _IDS_MAX = 48, 100_000
#: Bytes of memory that a value takes beside its own.
_VALUE_COST = 64
_CHUNK_BYTES = 65_536


class Cut(bytes):
    """The beginning of a value that was not kept whole; ``size`` is the size of the whole, 0 if not counted."""

    size: int = 0


#: In place of each value for which the limit left no room.
DROPPED = Cut()


class BoundedParser(_AsyncRESP2Parser):
    """The driver's own parser, except that one reply takes about ``limits.PULL_BYTES_MAX`` at most."""

    _room = limits.PULL_BYTES_MAX
    _ids_left = _IDS_MAX

    async def read_response(self, disable_decoding: bool = False) -> Any:
        self._room, self._ids_left = limits.PULL_BYTES_MAX, _IDS_MAX
        return await super().read_response(disable_decoding=disable_decoding)

    async def _read(self, length: int) -> bytes:
        if not 0 <= length <= VALUE_BYTES_MAX:
            raise exceptions.InvalidResponse(f"a value of {length} bytes")
        if length <= _ID_BYTES and self._ids_left > 0:
            self._ids_left -= 1
            return await self._whole(length)
        keep = length if length <= limits.ENVELOPE_BYTES_MAX else limits.REFUSED_BYTES_MAX
        if keep + _VALUE_COST > self._room:
            await self._skip(length + 2)
            self._room = 0
            return DROPPED
        self._room -= keep + _VALUE_COST
        if keep == length:
            return await self._whole(length)
        kept = Cut(await self._exactly(keep))
        kept.size = length
        await self._skip(length + 2 - keep)
        return kept

    async def _whole(self, length: int) -> bytes:
        value: bytes = await super()._read(length)
        # The driver keeps a second copy of the reply, to continue an interrupted read; we never continue one.
        self._chunks.clear()
        return value

    async def _skip(self, length: int) -> None:
        while length > 0:
            length -= len(await self._exactly(min(length, _CHUNK_BYTES)))

    async def _exactly(self, length: int) -> bytes:
        # From the stream, because the parser's buffer is empty: it is filled only by an interrupted read, and after one
        # the driver closes the connection.
        assert self._stream is not None
        try:
            return await self._stream.readexactly(length)
        except IncompleteReadError as error:
            raise exceptions.ConnectionError("connection closed by the server") from error
