"""Package extra_keys_cli."""
