"""Shadows the real uvloop on the path of a worker that is to run on asyncio's own loop."""

raise ImportError("this worker runs without uvloop")
