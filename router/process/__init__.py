"""Watches the router's process: garbage collection, policies that hang, signs of life for systemd.

Owns: thresholds of the collector, systemd's messages and watchdog, the watch over slow policies.
Gives: `garbage.settle`, `systemd.Pulse`, `hang_watch.HangWatch`.
Never imports: router.assembly, router.cli.
Start reading at: `garbage.py`.
"""
