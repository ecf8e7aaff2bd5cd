"""The engine-neutral part: it knows bytes, not engines. Nothing in it imports torch or an engine."""
