"""Prefixes of prompts that outlive an engine, as files which engines of one host share whatever their page size is.

store  the files; room  how much of the folder is taken, and what goes first
names  what a prefix is called; space  what its bytes mean
pages  an engine's pages as units of the store
"""
