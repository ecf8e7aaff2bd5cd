"""`--migration-backend deeplink`: LMDeploy's own disaggregation, with the handoff done by kvconnector.

    adapter   LMDeploy's cache pools and model config, in kvconnector's terms
    exchange  one engine's side: what prefill offers, what decode loads, and for how long
    part      a process's part of the cache: what is offered of it, and what is loaded into it
    spread    the same of a cache that is spread over processes; worker, what each of those does
    passage   how a ticket of deeplink's router gets past LMDeploy's server
    foreign   the tickets of handoffs that LMDeploy's own router (``lmdeploy serve proxy``) has paired
    requests  what of a request a handoff depends on
    forwards  how far an engine's model has come with what it was sent

    v0_18       what is changed in LMDeploy 0.18 so that its engines, servers and router know this migration backend
    calls_v0_18 how an engine calls its workers, which Ray runs
    loop_v0_18  what is changed in its loop and its scheduler, which call the exchange

A prefill engine stages the cache as soon as the prompt is computed, and its blocks are free right after.
"""
