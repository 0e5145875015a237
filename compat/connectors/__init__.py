"""Connectors that take servers as they are: by wire protocol 2, or through the tunnel where nobody upgraded them.

    vllm    TunnellingConnector

An engine loads one by its module path, as it loads those of `protocol_v2.connectors`. Nothing here imports an engine
before the engine imports it.
"""
