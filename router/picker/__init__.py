"""The endpoint picker: another data plane, as Envoy, asks here where each request goes.

Owns: messages of ext_proc v3 and their order, what a data plane is told and what it tells, the
addresses that it knows workers by.
Gives: `port.PickerPort`, which serves its streams.
Never imports: router.core.core, router.upstream.native.
Start reading at: `exchange.py` (one request, without I/O), then `picked.py` (how it is decided as
any other), then `port.py`.
"""
