"""Connections between two processes: bytes with deadlines, frames, the greeting by which each proves itself, TLS.

What is said over them is not known here. Everything that is read has a bound in size and in time.
"""
