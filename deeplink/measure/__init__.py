"""Profiling running engines over their OpenAI endpoints, into the solver's table of rates.

    streams   several requests at once, and when each token came
    points    what those times say about a step; pure
    engine    prefill by length and batch, decode by batch and context
    link      what a handoff adds, and how fast the cache travels

All times are a client's: they have HTTP, tokenization and scheduling in them, as a user's times have.
"""
