"""Package compat."""
