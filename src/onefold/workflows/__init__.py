"""Durable workflows and sagas: their code, their journals and their replays."""
