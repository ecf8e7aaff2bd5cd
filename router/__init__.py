"""The router: one OpenAI endpoint in front of engines that hand their KV cache to each other.

    app      the HTTP endpoint                        upstream  calls to an engine's API
    flow     which calls make one request             control   calls to an engine's control endpoint
    choice   which engine, or which pair              fleet     what is known about every engine now
    body     what the engines are sent                sse       where one event ends
    openai   how errors look to clients

`flow` and everything it imports know nothing of the HTTP server; `choice`, `body`, `sse` and `openai` do no
IO.
"""
