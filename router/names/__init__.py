"""Resolves the model names of clients to models: aliases, patterns, canaries.

Owns: the rules of names, the choice among a name's targets, the editing of answers, and the counts
of all this.
Gives: `model_names.ModelNames`, the `NameResolver` of `router.request.naming`; `rules.NameRules`,
which checks the configuration.
Never imports: router.admin, or another extra.
Start reading at: `rules.py`, then `model_names.py` (the choice).
"""
