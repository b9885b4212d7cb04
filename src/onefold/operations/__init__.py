"""The views and actions of operators."""
