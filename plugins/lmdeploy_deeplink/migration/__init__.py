"""`--migration-backend deeplink`: LMDeploy's own disaggregation, with the handoff done by kvconnector.

    adapter   LMDeploy's cache pools and model config, in kvconnector's terms
    exchange  one engine's side: what prefill offers, what decode loads, and for how long
    forwards  how far an engine's model has come with what it was sent

    v0_18       what is changed in LMDeploy 0.18 so that its engines and its router know this migration backend
    loop_v0_18  what is changed in its loop and its scheduler, which call the exchange

LMDeploy's router (``lmdeploy serve proxy``) pairs the engines. It passes on, unseen, a list of numbers that a prefill
engine answers with and a decode engine gets; LMDeploy takes them for block numbers, here it is one number that names a
handoff. So a prefill engine stages the cache as soon as the prompt is computed, and its blocks are free right after.
"""
