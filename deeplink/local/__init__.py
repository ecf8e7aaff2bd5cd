"""Engines and a router as processes of this machine: environments, models, start, stop, and the demo.

demo         two unlike engines and a router, from nothing; kinds  of which kinds they may be
prompts      its requests; measure  what became of one; report  what was found
up           a placement on this machine; on_ray  on a Ray cluster
placed       one of its engines as a process; trial  requests through all of it
engines      vLLM's command line and environment; sglang and lmdeploy  theirs
process      one engine or router as a process; launch  what ends it with its owner
environment  an engine's packages, from a lock file; overlay  deeplink beside them; cache  folders that are kept
step         one external command of a longer job
model        the demo's model; convert_gguf  where it comes from; disturb_weights  one that is a little off
client       asking the endpoints; completion  reading the answers; unreached  why there was none
"""
