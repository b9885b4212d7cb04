"""The speed of onefold beside the raw engine and its peers, in one run on one machine: ``python -m benchmarks``.

So are its latency beside very many other messages (``--only N1``), and its physical costs (``--only C1``).

Absolute figures change from machine to machine and from minute to minute, so a bar is a ratio:
the contenders take turns, and each round compares figures of the same minute.
"""
