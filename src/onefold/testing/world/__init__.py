"""The seeded simulation: simulated processes in one thread, with faults drawn from a seed."""
