"""Prefixes of prompts that outlive an engine, as files which engines of one host share whatever their page size is."""
