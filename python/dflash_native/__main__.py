"""`python -m dflash_native`: the command line."""

from .cli import app

app(prog_name="dflash-native")
