"""A process of the user's that keeps models loaded for programs that start often.

A program connects to a socket in a folder that only its user can enter, names a model, and sends requests.
It imports numpy, `client`, `folder`, `packets`, `descriptors`, and `file_lock` and `file_memory` of
`ortprep.bundle`, and neither ONNX Runtime nor what reads bundles. Client and host check that the other is a
process of the same user (`SO_PEERCRED`).

    client                                   host
    OPEN  path or name            ─────►     loads the model unless it is loaded
                                  ◄─────     OPENED
    RUN   arrays, deadline        ─────►     runs
                                  ◄─────     DONE    arrays      or FAILED  error

Each connection has a thread, which waits for a message, answers it, and waits again. One takes clients in.
Runs take turns: only so many go on at once, and the others wait. A connection is closed by its client, or by
the host after a message that breaks the protocol. It has no state but the model that it opened. Arrays travel
over it as bytes, and are received into memory that the other side does not have. A client that sends half a
message, or does not read its answer, keeps its own thread waiting and no other.

There is one host per user: it holds a lock on the folder (`flock`) until it ends. A client that starts one
takes the lock first, and the new host inherits it.
"""
