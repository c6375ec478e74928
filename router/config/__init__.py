"""Reads settings: each field of a Struct is a key with flag, variable, range, default and help.

Owns: the names of a key's flag, its variable and its place in the file; the sections of extras,
which may be left out of an installation while their keys stay.
Gives: `keys.keys_of`, `keys.ConfigKey`, `file.read_file`, `items.each`, `extras`, `hints`, `paths`.
Never imports: other packages of the router; of the policies only `policies.near`.
Start reading at: `keys.py`.
"""
