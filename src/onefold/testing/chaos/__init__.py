"""Chaos runs of a whole installation: faults hit workers, senders and the store at random, then all rows are compared.

    from onefold.testing.chaos.run import Settings, chaos_on_sqlite

    outcome = await chaos_on_sqlite(Settings(seed=1, seconds=60))
    assert not outcome.failed, outcome

Needs the ``postgres`` extra.  Nothing is imported here, because a run starts dozens of processes that need only parts.
"""
