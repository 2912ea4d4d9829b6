"""``python -m deltalens.cli``."""

from deltalens.cli import main

main()
