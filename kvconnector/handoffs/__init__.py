"""A handoff from its ticket to its end: the producer's side, the consumer's, and the conversation between them.

`channel` has what they say, `handoff` what can become of one. No engine and no particular transport is known here.
"""
