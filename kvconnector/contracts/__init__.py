"""What an engine states about itself, and what follows from two such statements: an agreement, or a refusal that names
the field, and which rank gives which part to whom.

Pure, so that both engines, the router and `deeplink contract` come to the same answer; `weights` reads a checkpoint's
files, and nothing else here does any IO.
"""
