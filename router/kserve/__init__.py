"""Routes KServe v2 requests of Triton's clients, by HTTP and gRPC, like any other request.

Owns: the paths and calls of KServe v2, the reading of tensors for routing, Triton's error form,
gRPC to workers.
Gives: `port.KservePort`, a dialect of the client port; `grpc_port.GrpcPort`, which serves gRPC;
`grpc_upstream.grpc_opener`, by which the fleet opens gRPC to workers.
Never imports: router.picker, or another extra.
Start reading at: `port.py`, then `content.py` (what is read of a request).
"""
