"""``python -m onefold``."""

from onefold.cli import main

main()
