"""What goes round any policy: takes its costs, returns new ones.

Owns: one file per built-in wrapper.
Gives: nothing from this face; `policies.WRAPPERS` names each one, `policies.load` puts them on.
Never imports: router, engine, simulator, kvkernels; only numpy, stdlib and other policies.
Start reading at: `bounded_load.py`.

A wrapper is a class with `adjust(costs, request, fleet, state)`, or a function of these: +inf
stays +inf, and only one that says so makes a request wait (all +inf). Written as
`hybrid|bounded_load?epsilon=0.25|late_binding`: the innermost first. One's own is named as
`package.module:attr`, or by an entry point of the group `warmroute.wrappers`.
"""
