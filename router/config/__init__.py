"""How settings are read: keys of any Struct, with flag, variable, range, default and help.

Owns: the names of a key's flag, its variable and its place in the file.
Gives: `keys.keys_of`, `keys.Key`, `file.read_file`, `items.each`.
Never imports: anything of the router.
Start reading at: `keys.py`.
"""
