"""What an engine states about itself, and what follows from two such statements: an agreement, or a refusal that names
the field. Pure, so that both engines, the router and `deeplink contract` come to the same answer; `weights` reads a
checkpoint's files.

    contract   the statement and its wire form
    negotiate  two of them into an agreement or a refusal; compare  all that differs, whether it decides or not
    forms      what the elements of one cache are to those of another
    shares     which rank gives which part to whom
    weights    which weights an engine serves; rope  its position encoding; prompt  which prompt a cache is of
"""
