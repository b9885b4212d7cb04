"""Workflows and sagas drawn from a seed, run by real workers that die at random, and judged by their journals.

``description`` says what a program is, ``drawing`` draws one, ``walking`` says what it means.  ``interpreter`` runs it
as a workflow or saga, ``reference`` follows what its journal recorded, and ``judging`` compares the two with what was
done to the ``outside`` and to the tables.  ``worlds`` puts programs into the seeded simulation, ``processes`` gives
them to real processes.
"""
