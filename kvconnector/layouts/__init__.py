"""What the bytes of a KV cache mean. Pure, and of one cache alone.

layout     the map from a logical element to a byte; notation  its text
catalogue  the layouts of known engines
elements   element types as number formats
cast       which of them can become which, and what that costs
"""
