"""The router's process: its garbage collector, its end if a policy hangs, its signs of life.

Owns: thresholds of the collector, systemd's messages and watchdog, the watch over slow policies.
Gives: `garbage.settle`, `systemd.Pulse`, `hang_watch.HangWatch`.
Never imports: router.assembly, router.cli.
Start reading at: `garbage.py`.
"""
