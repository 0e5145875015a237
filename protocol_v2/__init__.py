"""Package protocol_v2."""
