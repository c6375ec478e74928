"""Names that clients ask for, in place of the models that answer: aliases, patterns, canaries.

Owns: the rules of names, the choice among a name's targets, which answers are edited and how, and
what is counted of all this.
Gives: `model_names.ModelNames`, the `NameResolver` of `router.request.naming`; `rules.NameRules`,
by which the configuration is checked.
Never imports: router.admin, or another extra.
Start reading at: `rules.py`, then `model_names.py` (the choice).
"""
