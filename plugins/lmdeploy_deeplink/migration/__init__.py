"""`--migration-backend deeplink`: LMDeploy's own disaggregation, with the handoff done by kvconnector.

    adapter   LMDeploy's cache pools and model config, in kvconnector's terms
    exchange  one engine's side: what prefill offers, what decode loads, and for how long

LMDeploy's router (``lmdeploy serve proxy``) pairs the engines. It passes on, unseen, a list of numbers that a prefill
engine answers with and a decode engine gets; LMDeploy takes them for block numbers, here it is one number that names a
handoff. So a prefill engine stages the cache as soon as the prompt is computed, and its blocks are free right after.
"""
