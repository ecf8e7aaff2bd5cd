"""A handoff from its ticket to its end. No engine and no particular transport is known here.

    ticket    who may claim what until when
    handoff   what can become of one; tally  how many ended how
    channel   what the two sides say to each other

Producing:                                            Consuming:

    producer  stages finished chunks                      consumer    claims, and gives them to the engine's blocks
    offer     one handoff of it; offers  all of them      receive     the conversation with one source
    admission what a claim may ask for                    landing     chunks under way, verified when they are there
    serve     one claim; pushing  its pushes              order       what the engine asked for
    stages    how far a prefill is                        watching    a prefill that is not claimed yet
                                                          first_token what goes with the cache
"""
