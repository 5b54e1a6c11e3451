"""A process of the user's that keeps models loaded for programs that start often.

A program connects to a socket in a folder that only its user can enter, names a model, and sends requests.
It imports numpy, `client`, `folder`, `packets` and `descriptors`, and neither ONNX Runtime nor what reads
bundles. Client and host check that the other is a process of the same user (`SO_PEERCRED`).

    client                                   host
    OPEN  path or name            ─────►     loads the model unless it is loaded
                                  ◄─────     OPENED
    RUN   arrays, deadline        ─────►     runs
                                  ◄─────     DONE    arrays      or FAILED  error

Each connection has a thread, which waits for a packet, answers it, and waits again. One takes clients in.
Runs take turns: only so many go on at once, and the others wait. A connection is closed by its client, or by
the host after a packet that breaks the protocol, as one is that comes before the last answer was read. It has
no state but the model that it opened.

Arrays of up to 16 KiB travel in packets. Larger ones lie in a *region*: a memory file without a name, sealed
in size. Its descriptor travels with the packet. Who receives it reads the arrays out of it before anything
else, and maps nothing: the other side can change them at any time.

- The region of a request is the client's, which uses it for the next request again. A client that gave up
  leaves its region.
- The region of an answer is the host's until the packet is sent, and the client's from then on.

The kernel frees regions with the last process that has them, however it ends. There is one host per user:
it holds a lock on the folder (`flock`) until it ends. A client that starts one takes the lock first,
and the new host inherits it.
"""
