"""Wrappers of policies: a wrapper takes the costs of any policy and returns new ones.

Owns: one file per built-in wrapper.
Gives: nothing by itself; `policies.WRAPPERS` names each wrapper, `policies.load` applies them.
Never imports: router, engine, simulator, kvkernels; only numpy, stdlib and other policies.
Start reading at: `bounded_load.py`.

A wrapper is a class with `adjust(costs, request, fleet, state)`, or a function with these
arguments. A cost of +inf stays +inf. Only wrappers whose docstring says so hold requests (all costs
+inf). In a specification such as `hybrid|bounded_load?epsilon=0.25|late_binding`, the innermost
wrapper comes first. Name a wrapper of your own as `package.module:attr`, or by an entry point of
the group `warmroute.wrappers`.
"""
