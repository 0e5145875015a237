"""What an engine's side of the cache needs around keys: the files of adapters, and the connectors themselves.

lora_revision   what an adapter computes, from its own files or from the operator's word
"""
