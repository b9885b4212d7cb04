"""Chaos for a whole installation: workers, senders and the store are harmed at random, and every row is compared.

    from onefold.testing.chaos.run import Settings, chaos_on_sqlite

    outcome = await chaos_on_sqlite(Settings(seed=1, seconds=60))
    assert not outcome.failed, outcome

Needs the ``postgres`` extra.  Nothing is imported here: the processes of a run start by the dozen, and need only parts.
"""
