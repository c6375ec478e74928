"""What a router knows of its workers' caches, kept for the router after it.

Owns: the file of saved streams, when it is written, whose state is whose.
Gives: `StateKeeper` (`keeper.py`); `read_saved` and `SavedFile` of the file's format.
Never imports: sockets, HTTP; the core sees nothing of files.
Start reading at: `saved_file.py`.
"""
