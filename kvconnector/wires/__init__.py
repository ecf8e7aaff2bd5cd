"""Connections between two processes. What is said over them is not known here; everything that is read has a bound in
size and in time.

    wire      bytes, each call with a deadline; frames  messages; inbox  taken in as they come
    greeting  each end proves that it knows the secret; tls  over TLS
    listener  those who connect; visitors  to an HTTP server
    pool      connections that are kept
"""
