"""An engine's KV cache as it lies in one process: its arrays, the groups they form, and the proof that they are laid
out as declared. What an engine plugin hands to an `endpoint`.
"""
