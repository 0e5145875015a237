"""``python -m extra_keys_cli`` is the command ``extra-keys``."""

from extra_keys_cli.app import main

main()
