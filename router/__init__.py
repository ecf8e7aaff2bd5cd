"""The router: one OpenAI endpoint in front of engines that hand their KV cache to each other.

Protocol, bytes in and bytes out:

    serve      listening: the address, TLS, the end     logs       the log of a router that serves
    clients    all connections of clients, their clock  client     one of them: requests in, answers out
    head       reading a request's head, its limits     answers    writing an answer's head
    api        what clients ask for                     direct     a request that needs no task
    coding     bodies that are compressed               headers    which headers pass; names  what they mean
    paths      which paths pass                         keys       who may ask for what
    upstream   the connections to the engines' APIs     line       one of them; reply what comes of a request
    inner      a request that the HTTP library answers: health, metrics, the operators' API, the page
    app        the router put together                  control    calls to an engine's control endpoint
    admin      the operators' API; openapi  as a document   metrics    what is counted, for Prometheus
    page       the web page                             overview   what it shows; recent what ended lately
    openai     how errors look to clients               sse        where one event ends
    body       what the engines are sent                usage      which tokens of a handoff were cached

Flow, which calls make one request:

    exchange   one client request and its phase         flow       the order of calls, tries, and what is released
    stages     what an answer means, whose a fault is   call       asking one engine, relaying a stream
    retry      what may be tried again, and where not
    kinds      how engines of one kind hand over: kind_deeplink, kind_vllm, kind_sglang, kind_lmdeploy

Choice, which engine or which pair:

    choice     what may be chosen                       policy     what a policy is
    engine     one engine as it is known                declared   whether two without contracts agree
    said       reading what an engine says of itself    prompts    the tokens of a prompt
    kv_events  what engines tell of their caches        kv_index   which holds what, as they tell it
    kv_listen  hearing it                               kv_sequence  in which order, and what is missing
    policies   those that are built in                  admission  choosing now or after a wait
    load       what every engine has to do              prefix     what it probably holds
    breaker    leaving a failing engine alone           queue      waiting while all are full
    fleet      what is known about every engine now     listed     engines of the file
    routes     which engines a length is for            shared     what several routers share through Redis
    registered engines that register themselves         tracing    spans for OpenTelemetry
    parts      where the application keeps its parts    chooser    what a request needs of all this

Several workers on one port, and one process that owns what they must know together:

    owner      that process                             desk       what it keeps for each worker
    worker     one of the others                        borrowed   the parts above, as the owner tells it
    speech     what they say to each other

Only `api`, `app`, `admin`, `inner`, `page`, `parts` and `serve` know the HTTP library, and `control` as its client.
`choice`, `engine`, `declared`, `said`, `routes`, `policies`, `prefix`, `kv_events`, `kv_index`, `kv_sequence`,
`breaker`, `load`, `retry`, `paths`, `body`, `coding`, `head`, `headers`, `names`, `sse`, `usage` and `openai` do no IO.
"""
