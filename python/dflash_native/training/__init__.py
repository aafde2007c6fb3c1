"""The recipe of the demo pair: corpus, tokenizer, target, its continuations, two drafts, export.

`python -m dflash_native.training --help` lists the commands; README.md beside this file is the plan
of a run. Needs the extra `train`. Only `export` uses the rest of the package, so that where MLX is
not installed the folder above this one on PYTHONPATH and `python -m training` are enough.
"""
