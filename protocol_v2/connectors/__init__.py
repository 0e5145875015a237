"""What an engine's side of the cache needs: one engine-neutral core, and a thin connector for each engine.

    tracker           one request, from admission to end: the one key chain, lookup, load, save, leases (no I/O)
    scheduler_side    all requests of a scheduler, and the cache calls that it makes
    worker_side       loads into and saves out of one worker's KV
    paged             chunks out of paged tensors, and back
    settings          what an operator says
    lora_revision     what an adapter computes, from its own files or from the operator's word
    loaded_adapters   whether that is what the engine has loaded
    chunk_news        what a connector tells routers
    vllm_events       from vLLM's untagged block events to chunk events
    vllm              vLLM's connector; the only module that imports vLLM (imported by the engine, by its module path)
    vllm_engine, vllm_scheduler, vllm_worker
                      its parts: configuration, scheduler, worker
    sglang            what a radix cache of SGLang asks of the cache
    tensorrt_llm      TensorRT-LLM's connector, over its published interface

See docs/connectors.md for the life of a request, and for a connector in 60 lines.
"""
