"""The endpoint picker: another data plane, such as Envoy, asks it to which worker each request
should go.

Owns: messages of ext_proc v3 and their order, what a data plane is told and what it reports, the
addresses by which it knows workers.
Gives: `port.PickerPort`, which serves its streams.
Never imports: router.core.core, router.upstream.native.
Start reading at: `exchange.py` (one request, without I/O), then `picked.py` (its decision, which is
made like any other), then `port.py`.
"""
