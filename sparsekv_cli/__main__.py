"""``python -m sparsekv_cli``."""

from sparsekv_cli.cli import main

main()
