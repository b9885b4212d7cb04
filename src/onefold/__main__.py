"""``python -m onefold``."""

from onefold.cli.main import main

main()
