"""Workflows and sagas drawn from a seed, run by real workers that die at random, and checked against their journals.

``description`` defines the language of programs, ``drawing`` draws one, ``walking`` defines its meaning.
``interpreter`` runs it as a workflow or saga, ``reference`` follows the answers in its journal, and ``judging``
compares both with the effects at the provider (``outside``) and in the tables.  ``worlds`` runs programs in the
seeded simulation, ``processes`` on real processes.
"""
