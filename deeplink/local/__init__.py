"""Engines and a router as processes of this machine: environments, models, start, stop, and the demo."""
