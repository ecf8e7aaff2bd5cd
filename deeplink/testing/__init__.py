"""For authors of plugins: suites that hold their parts to what the core relies on. Needs pytest.

transport_conformance  all that is relied on in a transport, to be run on one's own
transport_arrivals     of it, what arrives; transport_ends  how pushes end; transport_strangers  who gets nowhere
transport_fixtures     what these share
peer                   a second process with the transport; forward  an address that leads to another
"""
