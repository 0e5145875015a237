"""Package keying."""
