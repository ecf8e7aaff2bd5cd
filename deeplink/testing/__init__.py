"""For authors of plugins: suites that hold their parts to what the core relies on. Needs pytest."""
