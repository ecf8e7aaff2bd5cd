"""The router: one OpenAI endpoint in front of engines that hand their KV cache to each other.

Protocol, bytes in and bytes out:

    serve      listening: limits, TLS, the end          upstream   the connections to the engines' APIs
    app        the HTTP endpoint                        control    calls to an engine's control endpoint
    admin      the operators' API                       headers    which headers pass
    paths      which paths pass                         keys       who may ask for what
    openai     how errors look to clients               sse        where one event ends
    usage      which tokens of a handoff were cached
    body       what the engines are sent                metrics    what is counted, for Prometheus

Flow, which calls make one request:

    exchange   one client request and its phase         flow       the order of calls, tries, and what is released
    stages     what an answer means, whose a fault is   call       asking one engine, relaying a stream
    retry      what may be tried again, and where not

Choice, which engine or which pair:

    choice     what may be chosen                       policy     what a policy is
    policies   those that are built in                  admission  choosing now or after a wait
    load       what every engine has to do              prefix     what it probably holds
    breaker    leaving a failing engine alone           queue      waiting while all are full
    fleet      what is known about every engine now     listed     engines of the file
    routes     which engines a length is for
    registered engines that register themselves         parts      where the application keeps its parts

Only `app`, `admin`, `parts` and `serve` know the HTTP server, only `upstream` and `control` the HTTP client. `choice`,
`routes`, `policies`, `prefix`, `breaker`, `load`, `retry`, `paths`, `body`, `headers`, `sse`, `usage` and `openai` do
no IO.
"""
