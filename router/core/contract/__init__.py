"""The core's interface besides its facts: settings, actions and counters.

Owns: the actions that the core answers with, its settings, its counters.
Gives: `actions`, `settings.CoreSettings`, `counters.CoreCounters`.
Never imports: the rest of the core.
Start reading at: `actions.py`.
"""
