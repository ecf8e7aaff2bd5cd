"""Requests through the engines of a placement, event by event.

engine    one engine's prompts and batch
simulate  all of them, with routes and links
"""
