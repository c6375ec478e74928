"""What a running router writes down, so that it can be played again.

Owns: the request log (one line a request, for replays; in a file or in `parts`) and the recording
of facts (for checks).
Gives: `request_log.RequestLog`, `recorder.FactRecorder`; formats: `request_line`, `facts`;
`facts.Player`, which plays a recording to a fresh core and says where it decides otherwise.
Never imports: aiohttp, zmq.
Start reading at: `request_line.py`.
"""
