"""KServe v2, as Triton's clients speak it, by HTTP and gRPC: their requests are routed as any.

Owns: its paths and calls, what of its tensors a request is routed by, its errors, gRPC to workers.
Gives: `port.KservePort`, a dialect of the client port; `grpc_port.GrpcPort`, which serves gRPC;
`grpc_upstream.grpc_opener`, by which the fleet opens it to workers.
Never imports: router.picker, or another extra.
Start reading at: `port.py`, then `content.py` (what is read of a request).
"""
