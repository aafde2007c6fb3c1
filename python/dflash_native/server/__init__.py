"""An OpenAI-compatible server (`app`, `serving`, `worker`), and the prefix cache that it keeps.

Nothing is imported here: `prefix_cache` is for engines without the packages of the extra `server`.
"""
