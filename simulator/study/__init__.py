"""The study behind `docs/policies.md`: which sweeps, with which rules and seeds; run and resumed.

Owns: the study's list (`study.yaml`) and its sweep files, how they become runs.
Gives: `command.run_study(command, console)`.
Never imports: aiohttp, asyncio; the replay's loop.
Start reading at: `study.yaml`, then `steps.py`.
"""
