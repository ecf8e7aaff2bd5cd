"""The router: one OpenAI endpoint in front of engines that hand their KV cache to each other.

    app       the HTTP endpoint                       call      asking one engine, judging its answer
    exchange  one client request and its phase        upstream  the connections to the engines' APIs
    flow      which calls make one request            control   calls to an engine's control endpoint
    choice    which engine, or which pair             fleet     what is known about every engine now
    body      what the engines are sent               headers   which headers pass
    sse       where one event ends                    openai    how errors look to clients

Only `app` knows the HTTP server, only `upstream` and `control` the HTTP client. `choice`, `body`,
`headers`, `sse` and `openai` do no IO.
"""
